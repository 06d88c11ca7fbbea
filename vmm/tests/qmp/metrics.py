"""Reads a file of metrics with Prometheus' own parser. usage: metrics.py FILE"""

import sys

from prometheus_client.parser import text_fd_to_metric_families

with open(sys.argv[1], encoding="utf-8") as file:
    families = list(text_fd_to_metric_families(file))

names = [family.name for family in families]
assert len(names) == len(set(names)), names
for family in families:
    assert family.type in ("counter", "gauge"), family
    assert family.documentation, family
    assert family.name.startswith("pollux_"), family
    for sample in family.samples:
        assert sample.value >= 0, sample
        if family.type == "counter":
            assert sample.name == family.name + "_total", sample
by_name = {family.name: family for family in families}
windows = by_name["pollux_iothread_window_seconds"].samples
assert {sample.labels["iothread"] for sample in windows} == {"io0", "io1", "main"}, windows
reads = {
    sample.labels["disk"]: sample.value
    for sample in by_name["pollux_disk_operations"].samples
    if sample.labels["operation"] == "read"
}
assert reads["d0"] > 0, reads
print("done")
