"""What the run costs beside a hand-written loop. Figures and commands: README.md here."""
