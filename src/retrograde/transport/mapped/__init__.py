"""Memory that ranks of one host share: shards and buckets that others read in place, and letters between main threads.

[Note: mapped memory]
Ranks that are processes of one host need no bytes on a socket. Each has one file without a name (`Arena`), in which its
shards lie, and every other rank maps it. A page is a mapping of shards (mirror.py), or small ones are copied straight
into it. A part of a gradient is copied into the arena once, as a parcel; its owner adds it up where it lies. Letters
(`Mailbox`) are taken by the main thread that waits for them, without waking a service thread.

What connections are for besides remains theirs: reads of shards that are not at rest, failures, the end of a rank. A
rank whose arena cannot be mapped is reached by its connection alone; nobody has to agree on that.

Rule 1: memory is written by its owner, but for three things: another rank may set its own flag of a stretch, a sender
        writes to its own box of the receiver, and the receiver of a parcel may write to it.
Rule 2: a shard is read only while its owner says that it is at rest, in a word beside the shards. What was copied
        counts if the word is still the same after it. What shows in a page is said to the owner before the word is
        looked at, and the owner waits for its end (mirror.py).
Rule 3: a parcel is free again when its receiver has set its flag. Nobody waits for that.
Rule 4: a file without a name ends with the last process that has it: whatever is killed, nothing is left behind. Its
        stretches are reserved when they are made, so that there is an error then and no signal later; they are never
        cut off, which the file is sealed against.
Rule 5: stores become visible in the order in which they are made, which is true of x86-64. On other machines there is
        no arena.
"""
