"""From captured rows to files: codecs, the shard's layout, the threads that write, and the documents of a run."""
