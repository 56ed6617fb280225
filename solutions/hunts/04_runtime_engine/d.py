"""A learning rate that warms up and decays, in a run that is resumed several times. A schedule knows how many steps it has made, and sets
the optimizer's rate for the next one."""

from math import cos, pi


class Optimizer:
    """Follows a gradient. used: the rate of each step."""

    def __init__(self, weight: float, rate: float):
        self.weight, self.rate, self.used = weight, rate, []

    def step(self) -> None:
        self.weight -= self.rate * self.weight  # the gradient of weight^2 / 2
        self.used.append(self.rate)


class Schedule:
    """Linear warm-up, and a cosine down to 0. When it is made it sets the rate of the first step."""

    def __init__(self, optimizer: Optimizer, peak: float, warm_up: int, steps: int):
        self.optimizer, self.peak, self.warm_up, self.steps, self.done = optimizer, peak, warm_up, steps, 0
        self.set_rate()

    def set_rate(self) -> None:
        left = max(0, self.done - self.warm_up) / (self.steps - self.warm_up)
        self.optimizer.rate = self.peak * min((self.done + 1) / self.warm_up, (1 + cos(pi * min(left, 1.0))) / 2)

    def step(self) -> None:
        self.done += 1
        self.set_rate()


def save(optimizer: Optimizer, schedule: Schedule) -> dict:
    return {"weight": optimizer.weight, "done": schedule.done, "used": list(optimizer.used)}


def resume(saved: dict, peak: float, warm_up: int, steps: int) -> tuple[Optimizer, Schedule]:
    """A new optimizer and a new schedule, as they were."""
    optimizer = Optimizer(saved["weight"], peak)
    schedule = Schedule(optimizer, peak, warm_up, steps)
    schedule.done = saved["done"]
    schedule.set_rate()
    optimizer.used = list(saved["used"])
    return optimizer, schedule


def train(steps: int, peak: float, warm_up: int, stops: list[int]) -> tuple[float, list[float]]:
    """The last weight and the rate of each step, of a run that is saved and resumed after each of the steps in `stops`."""
    optimizer = Optimizer(1.0, peak)
    schedule = Schedule(optimizer, peak, warm_up, steps)
    for step in range(1, steps + 1):
        optimizer.step()
        schedule.step()
        if step in stops:
            optimizer, schedule = resume(save(optimizer, schedule), peak, warm_up, steps)
    return optimizer.weight, optimizer.used


def main() -> None:
    print("resumed after       rate of step 1      4      9     16     20   last weight")
    for stops in ([], [10], [3, 10], [2, 3, 5, 10, 15]):
        weight, used = train(20, 0.3, 4, stops)
        rates = "  ".join(f"{used[step - 1]:5.3f}" for step in (1, 4, 9, 16, 20))
        print(f"{', '.join(map(str, stops)) or 'never':>16}   {rates:>45}   {weight:11.6f}")


if __name__ == "__main__":
    main()
