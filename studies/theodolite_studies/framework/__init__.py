"""What all studies share: cells, records, claims, and how they are reported."""
