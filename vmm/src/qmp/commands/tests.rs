use std::time::{Duration, Instant};

use serde_json::json;

use super::super::event;
use super::super::testing::TestMachine;
use super::*;

fn monitor() -> Monitor {
    Monitor::new(Arc::new(TestMachine::new(Default::default())))
}

fn ask(monitor: &Monitor, command: &str, arguments: Value) -> Result<Value, Error> {
    let Value::Object(arguments) = arguments else {
        panic!("arguments are an object")
    };
    let command = command.to_owned();
    monitor.execute(Call { command, arguments })
}

/// The answer of a command that succeeds.
fn get(monitor: &Monitor, command: &str, arguments: Value) -> Value {
    ask(monitor, command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// The words of one that fails.
fn refusal(monitor: &Monitor, command: &str, arguments: Value) -> String {
    match ask(monitor, command, arguments) {
        Ok(value) => panic!("{command}: {value}"),
        Err(error) => error.to_string(),
    }
}

fn setting(monitor: &Monitor, id: &str, property: &str) -> Value {
    let path = format!("/objects/{id}");
    get(
        monitor,
        "qom-get",
        json!({"path": path, "property": property}),
    )
}

fn set(monitor: &Monitor, id: &str, property: &str, value: Value) -> Result<Value, Error> {
    let path = format!("/objects/{id}");
    let arguments = json!({"path": path, "property": property, "value": value});
    ask(monitor, "qom-set", arguments)
}

#[test]
fn only_what_the_machine_can_do_is_offered() {
    let names = |monitor: &Monitor| -> Vec<String> {
        let list = get(monitor, "query-commands", json!({}));
        let names = list.as_array().unwrap().iter();
        names
            .map(|entry| entry["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let all = names(&monitor());
    for name in [
        "qmp_capabilities",
        "query-version",
        "query-commands",
        "query-qmp-schema",
        "query-status",
        "query-cpus-fast",
        "stop",
        "cont",
        "system_powerdown",
        "quit",
        "query-iothreads",
        "object-add",
        "object-del",
        "qom-list",
        "qom-get",
        "qom-set",
        "x-query-polling",
        "query-block",
        "query-blockstats",
        "block_resize",
        "blockdev-change-iothread",
        "human-monitor-command",
    ] {
        assert!(all.iter().any(|offered| offered == name), "{name}");
    }
    let mut machine = TestMachine::new(Default::default());
    machine.unable = vec![Ability::Pause, Ability::MoveDisk];
    let limited = Monitor::new(Arc::new(machine));
    let fewer = names(&limited);
    let missing: Vec<&String> = all.iter().filter(|name| !fewer.contains(name)).collect();
    assert_eq!(missing, ["stop", "cont", "blockdev-change-iothread"]);
    assert_eq!(
        ask(&limited, "stop", json!({})),
        Err(Error::CommandNotFound("stop".to_owned()))
    );
}

#[test]
fn the_schema_describes_every_command_and_event_down_to_builtin_types() {
    let monitor = monitor();
    let schema = get(&monitor, "query-qmp-schema", json!({}));
    let schema = schema.as_array().unwrap();
    let find = |name: &str| schema.iter().find(|entry| entry["name"] == name);
    let count = |meta: &str| {
        let all = schema.iter();
        all.filter(|entry| entry["meta-type"] == meta).count()
    };
    assert_eq!(count("command"), monitor.commands.len());
    assert_eq!(count("event"), 7);
    for entry in schema {
        let mut references: Vec<&Value> = ["arg-type", "ret-type", "element-type"]
            .iter()
            .filter_map(|key| entry.get(key))
            .collect();
        let members = entry["members"].as_array().into_iter().flatten();
        references.extend(members.filter_map(|member| member.get("type")));
        for reference in references {
            let name = reference.as_str().unwrap();
            assert!(find(name).is_some(), "{entry}: no type {name}");
        }
    }
    let members = |name: &str| find(name).unwrap()["members"].as_array().unwrap().clone();
    let arguments = find("object-add").unwrap()["arg-type"].as_str().unwrap();
    let arguments = members(arguments);
    assert!(arguments.contains(&json!({"name": "id", "type": "str"})));
    assert!(arguments.contains(&json!({"name": "poll-weight", "type": "int", "default": null})));
    let shutdown = find("SHUTDOWN").unwrap()["arg-type"].as_str().unwrap();
    assert_eq!(
        members(shutdown)[0],
        json!({"name": "guest", "type": "bool"})
    );
}

#[test]
fn settings_of_iothreads_are_read_and_changed() {
    let monitor = monitor();
    let list = get(&monitor, "query-iothreads", json!({}));
    let thread_id = list[1]["thread-id"].as_i64().unwrap();
    assert!(std::path::Path::new(&format!("/proc/self/task/{thread_id}")).exists());
    assert_eq!(
        list[1],
        json!({"id": "io1", "thread-id": thread_id, "poll-max-ns": 32768, "poll-grow": 2, "poll-shrink": 2,
               "poll-weight": 3, "aio-max-batch": 0})
    );
    for (property, value) in [
        ("poll-max-ns", 0),
        ("poll-max-ns", i64::MAX),
        ("poll-grow", 8),
        ("poll-shrink", 9),
        ("poll-weight", 63),
        ("aio-max-batch", 7),
    ] {
        set(&monitor, "io1", property, json!(value)).unwrap();
        assert_eq!(setting(&monitor, "io1", property), json!(value));
    }
    // The other one has kept its own.
    assert_eq!(setting(&monitor, "io0", "poll-weight"), json!(3));
    let list = get(&monitor, "query-iothreads", json!({}));
    assert_eq!(list[1]["poll-shrink"], json!(9));
    // This one has decimals.
    assert_eq!(setting(&monitor, "io1", "poll-alpha"), json!(0.1));
    for value in [json!(0), json!(0.25), json!(1.0), json!(10)] {
        set(&monitor, "io1", "poll-alpha", value.clone()).unwrap();
        let read = setting(&monitor, "io1", "poll-alpha");
        assert_eq!(read.as_f64(), value.as_f64());
    }
    // Read back, a 0 shows its default.
    set(&monitor, "io1", "poll-weight", json!(0)).unwrap();
    assert_eq!(setting(&monitor, "io1", "poll-weight"), json!(3));
}

#[test]
fn settings_out_of_range_and_properties_that_are_not_there_are_refused() {
    let monitor = monitor();
    let set = |property: &str, value: Value| {
        let error = set(&monitor, "io0", property, value).unwrap_err();
        error.to_string()
    };
    assert!(
        set("poll-weight", json!(64)).starts_with("poll-weight value must be in range [0, 63]")
    );
    let range = "poll-max-ns value must be in range [0, 9223372036854775807]";
    assert!(set("poll-max-ns", json!(-1)).starts_with(range));
    assert!(set("poll-max-ns", json!(u64::MAX)).starts_with(range));
    let wrong_type = "Invalid parameter type for 'poll-max-ns', expected: integer";
    for value in [
        json!("5"),
        json!(5.5),
        json!(5.0),
        json!(1e30),
        json!(null),
        json!(true),
    ] {
        assert_eq!(set("poll-max-ns", value), wrong_type);
    }
    assert!(set("poll-alpha", json!(10.01)).ends_with("in range [0, 10], not 10.01"));
    assert!(set("poll-alpha", json!(-1)).contains("in range [0, 10]"));
    assert_eq!(
        set("poll-alpha", json!("0.3")),
        "Invalid parameter type for 'poll-alpha', expected: number"
    );
    assert_eq!(set("nope", json!(1)), "Property 'iothread.nope' not found");
    assert_eq!(
        set("thread-id", json!(1)),
        "Property 'iothread.thread-id' not found"
    );
    assert_eq!(
        set("poll-policy", json!("off")),
        "Property 'iothread.poll-policy' is not writable"
    );
    assert_eq!(setting(&monitor, "io0", "poll-max-ns"), json!(32768));

    let path = |path: &str| {
        ask(
            &monitor,
            "qom-get",
            json!({"path": path, "property": "type"}),
        )
    };
    for (good, kind) in [
        ("/", "container"),
        ("/objects", "container"),
        ("/objects/", "container"),
        ("/objects/io0", "iothread"),
        ("io0", "iothread"),
    ] {
        assert_eq!(path(good), Ok(json!(kind)), "{good}");
    }
    for bad in [
        "/io0",
        "/objects/io2",
        "/objects/io0/x",
        "",
        "objects/io0/x",
        "main",
        "/machine",
    ] {
        assert_eq!(
            path(bad),
            Err(Error::DeviceNotFound(bad.to_owned())),
            "{bad}"
        );
    }
}

#[test]
fn every_listed_property_can_be_got() {
    let monitor = monitor();
    let mut paths = vec!["/".to_owned()];
    let mut seen = 0;
    while let Some(path) = paths.pop() {
        let list = get(&monitor, "qom-list", json!({"path": path}));
        for entry in list.as_array().unwrap() {
            let name = entry["name"].as_str().unwrap();
            let value = get(&monitor, "qom-get", json!({"path": path, "property": name}));
            let kind = entry["type"].as_str().unwrap();
            match kind {
                "int" => assert!(value.is_i64()),
                "number" => assert!(value.is_number()),
                "string" => assert!(value.is_string()),
                _ => {
                    assert!(kind.starts_with("child<"));
                    paths.push(value.as_str().unwrap().to_owned());
                }
            }
            seen += 1;
        }
    }
    // type, objects; type, io0, io1; twice type, six settings, policy.
    assert_eq!(seen, 2 + 3 + 2 * 8);
}

#[test]
fn iothreads_are_added_and_removed_but_not_from_under_a_disk() {
    let monitor = monitor();
    let add = |arguments: Value| ask(&monitor, "object-add", arguments);
    let given = json!({"qom-type": "iothread", "id": "io2", "poll-max-ns": 5, "cpus": "0"});
    assert_eq!(add(given), Ok(json!({})));
    assert_eq!(setting(&monitor, "io2", "poll-max-ns"), json!(5));
    assert_eq!(setting(&monitor, "io2", "poll-weight"), json!(3));
    for (arguments, problem) in [
        (
            json!({"qom-type": "iothread", "id": "io2"}),
            "id=io2: there is an iothread",
        ),
        (
            json!({"qom-type": "iothread", "id": "2"}),
            "id=2: not a name",
        ),
        (json!({"qom-type": "iothread"}), "Parameter 'id' is missing"),
        (json!({"id": "a"}), "Parameter 'qom-type' is missing"),
        (
            json!({"qom-type": "rng", "id": "a"}),
            "Parameter 'qom-type' does not accept value 'rng'",
        ),
        (
            json!({"qom-type": "iothread", "id": "a", "x": 1}),
            "Parameter 'x' is unexpected",
        ),
        (
            json!({"qom-type": "iothread", "id": "a", "poll-weight": 64}),
            "poll-weight=64: poll-weight value must be in range [0, 63]",
        ),
        (
            json!({"qom-type": "iothread", "id": "a", "poll-policy": "fast"}),
            "Parameter 'poll-policy' does not accept value 'fast'",
        ),
        (
            json!({"qom-type": "iothread", "id": "a", "cpus": "x"}),
            "not a list of numbers",
        ),
    ] {
        let words = refusal(&monitor, "object-add", arguments);
        assert!(words.starts_with(problem), "{words}");
    }
    let delete = |id: &str| ask(&monitor, "object-del", json!({"id": id}));
    assert_eq!(delete("io2"), Ok(json!({})));
    assert_eq!(
        delete("io2").unwrap_err().to_string(),
        "object 'io2' not found"
    );
    assert!(
        delete("io1")
            .unwrap_err()
            .to_string()
            .contains("in use by disk 'disk0'")
    );

    let change = |iothread: Value| {
        let arguments = json!({"device": "disk0", "iothread": iothread});
        ask(&monitor, "blockdev-change-iothread", arguments)
    };
    assert_eq!(change(json!("io0")), Ok(json!({})));
    assert_eq!(delete("io1"), Ok(json!({})));
    assert!(
        change(json!("io1"))
            .unwrap_err()
            .to_string()
            .contains("no iothread 'io1'")
    );
    assert_eq!(change(json!(null)), Ok(json!({})));
    assert_eq!(delete("io0"), Ok(json!({})));
    assert_eq!(get(&monitor, "query-iothreads", json!({})), json!([]));
    let nowhere = json!({"device": "disk9"});
    assert_eq!(
        ask(&monitor, "blockdev-change-iothread", nowhere),
        Err(Error::DeviceNotFound("disk9".to_owned()))
    );
}

#[test]
fn disks_are_told_in_qemus_names() {
    let monitor = monitor();
    let disks = get(&monitor, "query-block", json!({}));
    let pick = |pointer: &str| disks.pointer(pointer).unwrap().clone();
    for (pointer, value) in [
        ("/0/device", json!("disk0")),
        ("/0/io-status", json!("ok")),
        ("/0/inserted/file", json!("/images/disk0.img")),
        ("/0/inserted/ro", json!(false)),
        ("/0/inserted/image/virtual-size", json!(10 << 20)),
        (
            "/0/inserted/cache",
            json!({"writeback": true, "direct": true, "no-flush": false}),
        ),
        (
            "/0/iothread-vq-mapping",
            json!([{"iothread": "io0", "vqs": [0]}, {"iothread": "io1", "vqs": [1]}]),
        ),
        ("/1/inserted/ro", json!(true)),
        ("/1/iothread-vq-mapping", json!([{"vqs": [0]}])),
    ] {
        assert_eq!(pick(pointer), value, "{pointer}");
    }
    let stats = get(&monitor, "query-blockstats", json!({}));
    for (name, value) in [
        ("rd_operations", 3),
        ("rd_bytes", 4096),
        ("failed_rd_operations", 2),
        ("wr_operations", 1),
        ("wr_bytes", 512),
        ("wr_highest_offset", 77),
    ] {
        assert_eq!(stats[0]["stats"][name], json!(value), "{name}");
    }
}

#[test]
fn a_disk_is_resized_by_device_or_node_name() {
    let monitor = monitor();
    let resize = |arguments: Value| ask(&monitor, "block_resize", arguments);
    assert_eq!(
        resize(json!({"device": "disk0", "size": 1 << 30})),
        Ok(json!({}))
    );
    assert_eq!(
        resize(json!({"node-name": "disk0", "size": 2u64 << 30})),
        Ok(json!({}))
    );
    let disks = get(&monitor, "query-block", json!({}));
    assert_eq!(
        disks[0]["inserted"]["image"]["virtual-size"],
        json!(2u64 << 30)
    );
    for (arguments, problem) in [
        (
            json!({"device": "disk0", "size": -1}),
            "Parameter 'size' expects a >0 size",
        ),
        (
            json!({"device": "disk1", "size": 512}),
            "Image is read-only",
        ),
        (
            json!({"device": "nope", "size": 1}),
            "Cannot find device='nope' nor node-name=''",
        ),
        (json!({"size": 1}), "Cannot find device='' nor node-name=''"),
        (
            json!({"device": "disk0", "node-name": "disk1", "size": 1}),
            "Cannot find device='disk0' nor node-name='disk1'",
        ),
    ] {
        assert_eq!(refusal(&monitor, "block_resize", arguments), problem);
    }
}

#[test]
fn the_guest_is_stopped_continued_powered_down_and_quit() {
    let (sink, queue) = event::channel().unwrap();
    let monitor = Monitor::new(Arc::new(TestMachine::new(sink)));
    let step = |command: &str| -> Vec<String> {
        assert_eq!(get(&monitor, command, json!({})), json!({}));
        let (events, _) = queue.take();
        let names = events.iter().map(|event| event["event"].as_str());
        names.map(|name| name.unwrap().to_owned()).collect()
    };
    assert_eq!(step("stop"), ["STOP"]);
    assert_eq!(step("stop"), [] as [&str; 0]);
    let status = json!({"running": false, "status": "paused"});
    assert_eq!(get(&monitor, "query-status", json!({})), status);
    let human = json!({"command-line": "info status"});
    assert_eq!(
        get(&monitor, "human-monitor-command", human),
        json!("VM status: paused\r\n")
    );
    assert_eq!(step("cont"), ["RESUME"]);
    let status = json!({"running": true, "status": "running"});
    assert_eq!(get(&monitor, "query-status", json!({})), status);
    assert_eq!(step("system_powerdown"), ["POWERDOWN"]);
    assert_eq!(step("quit"), ["SHUTDOWN"]);
    let cpus = get(&monitor, "query-cpus-fast", json!({}));
    assert_eq!(cpus[1]["cpu-index"], json!(1));
    assert_eq!(cpus[1]["thread-id"], json!(1000));
}

#[test]
fn info_iothreads_has_qemus_layout() {
    let monitor = monitor();
    let list = get(&monitor, "query-iothreads", json!({}));
    let ask = |line: &str| {
        get(
            &monitor,
            "human-monitor-command",
            json!({"command-line": line}),
        )
    };
    let expected = format!(
        "io0:\r\n  thread_id={}\r\n  poll-max-ns=32768\r\n  poll-grow=2\r\n  poll-shrink=2\r\n  poll-weight=3\r\n  \
         aio-max-batch=0\r\nio1:\r\n  thread_id={}\r\n",
        list[0]["thread-id"], list[1]["thread-id"]
    );
    let text = ask(" info  iothreads ");
    assert!(text.as_str().unwrap().starts_with(&expected), "{text}");
    assert_eq!(ask(""), json!(""));
    assert_eq!(ask("info foo"), json!("unknown command: 'info foo'\r\n"));
}

#[test]
fn polling_is_counted_and_a_changed_setting_shows() {
    let monitor = monitor();
    let polling = |id: &str| get(&monitor, "x-query-polling", json!({"id": id}))[0].clone();
    let all = get(&monitor, "x-query-polling", json!({}));
    let ids: Vec<&str> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["io0", "io1", "main"]);
    let nobody = json!({"id": "io9"});
    assert_eq!(
        ask(&monitor, "x-query-polling", nobody),
        Err(Error::DeviceNotFound("io9".to_owned()))
    );

    let before = polling("io0");
    assert_eq!(before["poll-policy"], "weighted");
    assert!(before["cpu-ns"].as_u64().unwrap() > 0);
    // A change of a setting runs the loop once; so does any work that is sent to it.
    set(&monitor, "io0", "poll-max-ns", json!(0)).unwrap();
    let machine = monitor.machine.iothreads();
    machine[0].remote.call(|_| ()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let after = loop {
        let after = polling("io0");
        if after["iterations"].as_u64() > before["iterations"].as_u64() || Instant::now() > deadline
        {
            break after;
        }
    };
    assert!(after["iterations"].as_u64() > before["iterations"].as_u64());
    assert!(after["time-ns"].as_i64() > before["time-ns"].as_i64());
    assert_eq!(after["window-ns"], json!(0));
    let sum = after["hits"].as_u64().unwrap() + after["misses"].as_u64().unwrap();
    assert_eq!(after["windows"], json!(sum));
}

#[test]
fn trace_events_are_switched_with_qemus_names_and_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let without = monitor();
    let all = get(&without, "trace-event-get-state", json!({"name": "*"}));
    assert!(
        all.as_array()
            .unwrap()
            .iter()
            .all(|event| event["state"] == "unavailable")
    );
    let switch = json!({"name": "poll_grow", "enable": true});
    let text = refusal(&without, "trace-event-set-state", switch);
    assert!(text.contains("--trace file=FILE"), "{text}");
    get(
        &without,
        "trace-event-set-state",
        json!({"name": "poll_grow", "enable": true, "ignore-unavailable": true}),
    );

    let mut machine = TestMachine::new(event::Sink::default());
    let trace = serde_json::from_value(json!({"file": dir.path().join("trace"), "events": []}));
    machine.tracer = Some(crate::trace::Tracer::start(&trace.unwrap()).unwrap());
    let monitor = Monitor::new(Arc::new(machine));
    let state = |name: &str| get(&monitor, "trace-event-get-state", json!({"name": name}));
    let set = |name: &str, enable: bool| {
        let switch = json!({"name": name, "enable": enable});
        ask(&monitor, "trace-event-set-state", switch)
    };
    assert_eq!(
        state("poll_grow"),
        json!([{"name": "poll_grow", "state": "disabled"}])
    );
    assert_eq!(set("poll_*", true).unwrap(), json!({}));
    set("poll_shrink", false).unwrap();
    assert_eq!(
        state("poll_[gs]*"),
        json!([]),
        "only * and ? are special, as in QEMU"
    );
    assert_eq!(
        state("poll_*r*"),
        json!([
            {"name": "poll_grow", "state": "enabled"},
            {"name": "poll_shrink", "state": "disabled"},
            {"name": "poll_remove", "state": "enabled"},
            {"name": "poll_observe", "state": "enabled"},
            {"name": "poll_handler", "state": "enabled"},
            {"name": "poll_reading", "state": "enabled"},
            {"name": "poll_trial", "state": "enabled"},
        ])
    );
    assert_eq!(state("run_*")[0]["state"], "disabled");
    for (command, arguments) in [
        ("trace-event-get-state", json!({"name": "poll_grwo"})),
        (
            "trace-event-set-state",
            json!({"name": "poll_grwo", "enable": true}),
        ),
    ] {
        let text = refusal(&monitor, command, arguments);
        assert_eq!(text, "unknown event \"poll_grwo\"; did you mean poll_grow?");
    }
}
