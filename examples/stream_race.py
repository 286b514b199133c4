"""A race between streams that corrupts gradients, found on a CPU in a second, and the wait that ends it.

Compiled regions and hooks may hand over gradients from several streams. If the stream that reduces a bucket waits for
one of them only, it may send a part that is not written yet. On hardware this needs the right moment; here the device
is simulated, its streams are queues, and every order of work that the events leave open is tried. The bucket is the
engine's own.

    python examples/stream_race.py
"""

import torch

from retrograde.devices import Stream
from retrograde.devices.simulated import Corrupted, SimulatedDevice, Site, explore
from retrograde.devices.simulated.explore import MemoryCheck
from retrograde.gradients.bucket import Bucket
from retrograde.layout import Layout
from retrograde.ledger import Ledger
from retrograde.pages import BufferPool
from retrograde.transport import Memory


class Host:
    """Memory for buckets: nobody else is to reach it here."""

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        return stream.empty(numel, dtype)


VALUES = (1.0, 2.0, 3.0)  # the gradients of three parameters
SIZE = 16  # elements of each


def program(device: SimulatedDevice) -> MemoryCheck:
    """Three streams compute a gradient each; the third is not copied but sent from where it lies."""
    layout = Layout([(f"p{i}", torch.Size([SIZE])) for i in range(3)], torch.float32, world=1)
    producers = [device.stream(f"producer {number}") for number in range(3)]
    grads = [device.memory(SIZE) for _ in VALUES]
    pool = BufferPool(Memory.BUCKET, Host(), device, Ledger())
    bucket = Bucket("block", layout, layout.dtype, pool, kept={2: grads[2]})
    for slot, (stream, grad, value) in enumerate(zip(producers, grads, VALUES, strict=True)):
        stream.run(lambda grad=grad, value=value: grad.fill_(value))
        with device.on(stream):
            bucket.add([grad if index == slot else None for index in range(3)])
    sent = device.memory(layout.padded_numel)
    bucket.close(device.reducing)
    device.reducing.run(lambda: torch.cat(bucket.parts(0), out=sent))
    wanted = torch.tensor(VALUES).repeat_interleave(SIZE)
    said = f"instead of {list(VALUES)}"
    return lambda: [] if torch.equal(sent, wanted) else [f"the reduction sends {sent[::SIZE].tolist()} {said}"]


def waits() -> list[Site]:
    """The single waits of the reducing stream, one for each producer."""
    device = SimulatedDevice()
    program(device)
    last = max(site for site in device.sites if site.kind == "wait")  # producers wait too, for free storage, before
    return [last._replace(time=time) for time in (1, 2, 3)]


def main() -> None:
    for number, wait in enumerate(waits()):
        print(f"\n--- the reduction does not wait for producer {number}")
        try:
            explore(program, without=wait)
            raise SystemExit("no race was found, which cannot be")
        except Corrupted as error:
            print(error)
    found = explore(program)
    print(f"\n--- with every wait: no race in any of {found.interleavings:,} interleavings ({found.states} states)")


if __name__ == "__main__":
    main()
