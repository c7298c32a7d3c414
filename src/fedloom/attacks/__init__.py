"""What hostile clients do, for runs that try out defences: recipes name it in their section `attack`."""

from fedloom.attacks.named import ATTACKS as ATTACKS
