"""How close a sifted cache stays to the full one, against the physical bytes that it takes."""
