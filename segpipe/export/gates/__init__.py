"""Gates G1 to G6: comparisons that a file passes before it is published."""
