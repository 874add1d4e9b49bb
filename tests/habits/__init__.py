"""Ways in which people write training loops, each through every kind of disturbance, compared with plain torch.

    kit.py              what a loop gets: its model, data, and the points at which a worker is lost
    shapes.py           loops in which entries differ by one part
    loops_*.py          the loops, by family; each is one function, run by plain torch and by workers alike
    test_habits.py      plain torch against undisturbed, killed, noticed and replaced workers, to the bit
    page.py             writes docs/scripts.md from the table
"""
