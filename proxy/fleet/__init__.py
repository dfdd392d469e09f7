"""The engines behind one address: choose one, watch them all. Knows no wire format."""
