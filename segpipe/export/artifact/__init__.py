"""The files around the model: manifest, checksums, golden answers, model card, robot files."""
