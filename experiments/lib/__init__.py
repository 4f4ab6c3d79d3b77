"""What the scripts share, whatever they measure."""
