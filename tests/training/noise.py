"""Images that nothing can be learnt from, for what a training does to weights."""

import torch


class Images(torch.utils.data.Dataset):
    """Fixed noise with hard or soft labels."""

    def __init__(self, count=12, soft=False):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(count, 3, 8, 8, generator=generator)
        self.labels = torch.arange(count) % 3
        if soft:
            self.labels = torch.rand(count, 3, generator=generator).softmax(-1)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}
