//! An agent in a process that may have little: it starts, or says before UCX is called what there is too little of.

use std::net::TcpListener;
use std::process::{Command, Output};

use crate::common::agent::config;
use crate::common::skip::skip;
use kvferry::agent::{Agent, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Set in a child, to what it does once the first start has failed: raises this limit and starts again.
const CHILD: &str = "KVFERRY_TEST_START";

/// Set in a child that is not to have the transport auto.
const TRANSPORT: &str = "KVFERRY_TEST_TRANSPORT";

/// The other processes of these tests: starts an agent and prints what came of it.
#[test]
fn child() {
    let Ok(then) = std::env::var(CHILD) else { return };
    let transport = std::env::var(TRANSPORT).map_or(Transport::Auto, |name| Transport::parse(&name).unwrap());
    let start = || match Agent::start(config("a", transport)) {
        Ok(agent) => {
            println!("\nstarted");
            agent.shutdown(std::time::Duration::from_secs(20)).unwrap();
        }
        Err(error) => println!("\nrefused: {error}"),
    };
    start();
    let resource = match then.as_str() {
        "files" => Resource::Nofile,
        "threads" => Resource::Nproc,
        _ => return,
    };
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: maximum.or(Some(4096)), maximum }).unwrap();
    start();
}

/// Runs a child behind `before`, words of a command that runs what follows them.
fn run(before: &[&str], then: &str, env: &[(&str, &str)]) -> Output {
    let me = std::env::current_exe().unwrap();
    let mut words = before.iter().map(std::ffi::OsStr::new).chain([me.as_os_str()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["--exact", "limits::child", "--nocapture", "--test-threads=1"]).env(CHILD, then);
    command.envs(env.iter().copied()).output().unwrap()
}

fn said(output: &Output) -> String {
    let all = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert!(output.status.success(), "{}: {all}", output.status);
    all
}

/// Whether this machine can run `before` at all.
fn can(before: &[&str]) -> bool {
    Command::new(before[0]).args(&before[1..]).arg("true").output().is_ok_and(|output| output.status.success())
}

/// A /dev/shm of its own with `size`.
fn little_shared_memory(size: &str) -> Vec<String> {
    let script = format!("mount --make-rprivate / && mount -t tmpfs -o size={size} tmpfs /dev/shm && exec \"$@\"");
    ["unshare", "-m", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
}

#[test]
fn little_shared_memory_is_enough() {
    for size in ["1m", "17m", "19m"] {
        let before = little_shared_memory(size);
        let before: Vec<&str> = before.iter().map(String::as_str).collect();
        if !can(&before) {
            return skip("mount namespace", "unshare -m and mount are refused");
        }
        let text = said(&run(&before, "end", &[]));
        assert!(text.contains("\nstarted"), "{size}: {text}");
        // Transports that would need it are refused where the operator asks for them.
        let text = said(&run(&before, "end", &[("UCX_TLS", "all")]));
        assert!(text.contains("refused") && text.contains("/dev/shm") && text.contains("UCX_TLS"), "{size}: {text}");
    }
}

#[test]
fn too_few_descriptors_are_named() {
    let before = ["prlimit", "--nofile=30:4096"];
    if !can(&before) {
        return skip("prlimit", "it cannot be run");
    }
    // A low soft limit is raised.
    let text = said(&run(&before, "end", &[]));
    assert!(text.contains("\nstarted"), "{text}");
    let script = "ulimit -S -n 30; exec \"$@\"";
    let hard = ["prlimit", "--nofile=30:30", "sh", "-c", script, "sh"];
    let text = said(&run(&hard, "end", &[]));
    for part in ["refused", "more files can be opened", "which is 30", "ulimit -n"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn too_few_threads_are_named() {
    // The first leaves none for the progress thread, the second one for UCX, which needs it beside others.
    for most in ["2", "4"] {
        let limit = format!("--nproc={most}:4096");
        // A user that nobody else is, because threads are counted by user. Root has no limit.
        let before = ["setpriv", "--reuid=61234", "--clear-groups", "prlimit", &limit];
        if !can(&before) {
            return skip("setpriv", "another user cannot be taken on");
        }
        let text = said(&run(&before, "threads", &[]));
        for part in ["refused", "more threads can be started", "ulimit -u"] {
            assert!(text.contains(part), "{text}");
        }
        // The failed start has left nothing behind that stops the next one.
        assert!(text.contains("\nstarted"), "{text}");
    }
}

/// UCX itself tries such ports for ever.
#[test]
fn a_used_up_port_range_is_named() {
    let held = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = held.local_addr().unwrap().port().to_string();
    for (name, transport) in [("auto", Transport::Auto), ("tcp", Transport::Tcp)] {
        let text = said(&run(&["env"], "end", &[("UCX_TCP_PORT_RANGE", &port), (TRANSPORT, name)]));
        let expected = format!("every port of UCX_TCP_PORT_RANGE, {port}-{port}, is in use");
        assert!(text.contains("refused") && text.contains(&expected), "{transport:?}: {text}");
    }
}

#[test]
fn an_agent_needs_one_port_of_the_range() {
    let held = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = held.local_addr().unwrap().port().to_string();
    drop(held);
    let text = said(&run(&["env"], "end", &[("UCX_TCP_PORT_RANGE", &port)]));
    // Another process may have taken it since.
    assert!(text.contains("\nstarted") || text.contains("is in use"), "{text}");
}
