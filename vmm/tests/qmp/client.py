"""Drives a VM with the qemu.qmp package, as a user of QEMU would. usage: client.py SOCKET"""

import asyncio
import sys

from qemu.qmp import EventListener, ExecuteError, QMPClient


async def refused(client, command, arguments=None):
    """The error class and words of a command that fails."""
    try:
        await client.execute(command, arguments)
    except ExecuteError as error:
        return error.error_class, str(error)
    raise AssertionError(f"{command} succeeded")


async def settings(client):
    before = {one["id"]: one for one in await client.execute("query-iothreads")}
    assert list(before) == ["io0", "io1"], before
    assert before["io0"]["poll-max-ns"] == 32768, before
    assert before["io0"]["thread-id"] > 1

    path = {"path": "/objects/io0", "property": "poll-max-ns"}
    await client.execute("qom-set", {**path, "value": 4000})
    assert await client.execute("qom-get", path) == 4000
    kind, words = await refused(client, "qom-set", {**path, "value": -1})
    assert kind == "GenericError" and "must be in range [0, 9223372036854775807]" in words, words
    kind, _ = await refused(client, "qom-get", {**path, "path": "/objects/io7"})
    assert kind == "DeviceNotFound", kind
    kind, _ = await refused(client, "migrate")
    assert kind == "CommandNotFound", kind
    names = {one["name"] for one in await client.execute("qom-list", {"path": "/objects"})}
    assert names == {"type", "io0", "io1"}, names

    await client.execute("object-add", {"qom-type": "iothread", "id": "io2", "poll-weight": 5})
    assert await client.execute("qom-get", {"path": "io2", "property": "poll-weight"}) == 5
    await client.execute("object-del", {"id": "io2"})
    _, words = await refused(client, "object-del", {"id": "io0"})
    assert "in use by disk 'd0'" in words, words


async def disks(client):
    (disk,) = await client.execute("query-block")
    assert disk["device"] == "d0" and disk["inserted"]["image"]["virtual-size"] == 16 << 20, disk
    assert disk["iothread-vq-mapping"] == [{"iothread": "io0", "vqs": [0]}], disk
    await client.execute("blockdev-change-iothread", {"device": "d0", "iothread": "io1"})
    (disk,) = await client.execute("query-block")
    assert disk["iothread-vq-mapping"][0]["iothread"] == "io1", disk
    await client.execute("block_resize", {"device": "d0", "size": 32 << 20})
    (disk,) = await client.execute("query-block")
    assert disk["inserted"]["image"]["virtual-size"] == 32 << 20, disk
    (stats,) = await client.execute("query-blockstats")
    before = stats["stats"]["rd_operations"]
    for _ in range(200):
        (stats,) = await client.execute("query-blockstats")
        if stats["stats"]["rd_operations"] > before:
            break
        await asyncio.sleep(0.05)
    assert stats["stats"]["rd_operations"] > before, stats


async def running(client):
    events = EventListener(("STOP", "RESUME", "POWERDOWN", "SHUTDOWN"))
    with client.listen(events):
        for command, event, status in [("stop", "STOP", "paused"), ("cont", "RESUME", "running")]:
            await client.execute(command)
            told = await asyncio.wait_for(events.get(), 20)
            assert told["event"] == event, told
            assert told["timestamp"]["seconds"] > 1_600_000_000, told
            state = await client.execute("query-status")
            assert state["status"] == status, state
        await client.execute("system_powerdown")
        told = await asyncio.wait_for(events.get(), 20)
        assert told["event"] == "POWERDOWN", told
        await client.execute("quit")
        told = await asyncio.wait_for(events.get(), 20)
        assert told["event"] == "SHUTDOWN", told
        assert told["data"] == {"guest": False, "reason": "host-qmp-quit"}, told


async def main(socket):
    # Others are connected too, one of them never reads.
    deaf = await asyncio.open_unix_connection(socket)
    second = QMPClient("second")
    await second.connect(socket)
    client = QMPClient("first")
    await client.connect(socket)
    version = await client.execute("query-version")
    assert "pollux" in version["package"], version
    offered = {one["name"] for one in await client.execute("query-commands")}
    schema = await client.execute("query-qmp-schema")
    described = {one["name"] for one in schema if one["meta-type"] == "command"}
    assert offered == described, offered ^ described
    cpus = await client.execute("query-cpus-fast")
    assert [one["cpu-index"] for one in cpus] == [0], cpus
    text = await client.execute("human-monitor-command", {"command-line": "info iothreads"})
    assert text.startswith("io0:\r\n  thread_id="), text
    await settings(client)
    await disks(client)
    await running(client)
    for one in (second, client):
        try:
            await one.disconnect()
        except EOFError:
            # The VM has ended and hung up, as it should.
            pass
    deaf[1].close()


asyncio.run(main(sys.argv[1]))
print("done")
