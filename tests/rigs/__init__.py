"""What several tests set up, and the programs that they start as processes of their own."""
