"""What makes the same run give the same bits, and what shows that it did."""
