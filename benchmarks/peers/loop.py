"""By hand: nothing but torch."""

import copy
import sys

import torch
from job import ROUNDS, Clock, epoch, network, shares


def main(path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    data, model, clock = shares(path), network(), Clock()
    server = copy.deepcopy(model.state_dict())
    for _ in range(ROUNDS):
        states = []
        for x, y in data:
            model.load_state_dict(server)
            epoch(model, x, y)
            states.append(copy.deepcopy(model.state_dict()))
        total = sum(len(y) for _, y in data)
        server = {
            name: sum(len(y) / total * state[name] for (_, y), state in zip(data, states, strict=True))
            for name in server
        }
        clock.tick()
    clock.tell()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
