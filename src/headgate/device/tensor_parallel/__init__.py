"""One model on several ranks: the processes, their group, and the executors that keep them in step."""
