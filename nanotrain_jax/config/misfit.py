"""The error of a config whose keys do not fit each other."""


class Misfit(ValueError):
    """A config that cannot run: "problem; remedy". reason: short form of the problem, to group similar ones."""

    def __init__(self, problem: str, remedy: str = "", reason: str = ""):
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.reason = reason or problem
