"""`python -m sim` is the command `speckv`. Knows the command and nothing else."""

from sim.cli import main

if __name__ == "__main__":
    main()
