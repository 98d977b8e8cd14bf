"""What broke once or still does: threads beside a recording that fails."""

import threading

import torch
from torch import nn

import accel

torch.set_num_threads(1)


class Refuses(nn.Module):
    "its recording is refused (a host random number), after another thread changed the module"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.0
        self.during = None

    def forward(self, x):
        if self.during:
            t = threading.Thread(target=self.during)
            t.start()
            t.join()
        return self.layer(x) * float(torch.rand(1) * 0 + 1)


def test_a_setting_made_by_another_thread_survives(sim):
    m = accel.patch(Refuses().to(sim), capture="always")
    x = torch.ones(2, 4, device=sim)
    with torch.no_grad():
        m(x)
        todo = iter([0.5])  # which no one sees, nor puts back

        def change():
            m.scale = next(todo, m.scale)

        m.during = change
        m.scale = 1.0
        m(x)
        m(x)
    assert m.scale == 0.5
