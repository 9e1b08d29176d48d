"""Files and values that several tests are made of; nothing here is a test."""
