"""The lab: measure, tune, explain, certify. Every verb makes one `Result`, a versioned JSON file
that reports are made from."""
