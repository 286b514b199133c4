"""Other libraries' words for what retrograde does. A front end uses the package's public face and nothing else."""
