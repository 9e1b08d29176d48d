"""What files can be trusted with: pickles judged, files verified and signed."""
