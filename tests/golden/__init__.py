"""The golden run: what safeload reads, writes, reports and says of fixed inputs, against a record. See README.md."""
