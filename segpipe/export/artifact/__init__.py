"""The files around the models: manifest, checksums, golden answers, report, model card, robot files."""
