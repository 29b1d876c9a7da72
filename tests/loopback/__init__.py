"""A small, honest Hugging Face Hub on 127.0.0.1, for tests with the unmodified huggingface_hub and hf_xet clients.

    python -m loopback --root DIR --ready-file FILE      # FILE: {"endpoint", "storage", "secret", "pid"} once listening

Two origins: the Hub itself, and a storage that plays S3, CDN and Xet's content-addressed store, with signed addresses,
so that redirects are real and a token that leaves the Hub's origin is seen.

Honest: blobs are kept by their SHA-256; an LFS or Xet object is admitted only if its bytes hash to what was claimed; a
commit only if every blob it names was uploaded; `fsck` re-hashes every blob of every commit. Not real: commit ids
(random, no git), a card validator that knows the main rules only, Xet's own hashes (not recomputed; the file's SHA-256
is), no quotas, no pages but those of a user's models, repositories and collections in memory alone, data sets only as
they are read, under the names of models. Status codes and messages follow the client's source.

Users: alice (tokens hf_alice_write, hf_alice_read), bob (hf_bob_write); alice may write to the organisation acme, bob
may read it.

Faults are injected by the tests (`client.Loopback.fault`); see `handler.py` for what there is.
"""
