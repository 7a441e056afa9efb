//! The layers of `src` and `proto/src`, read from what their files import. The modules of the crate `kvferry-proto` are
//! those of `proto` here, as in `kvferry`, which exports them under this name.
//!
//! docs/architecture.md says what the layers are for. Files may not import each other in a circle, where a module's use of
//! its own submodules does not count. Unit tests, which stand last in a file, may import what they like.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The top modules, from the bottom up. A module imports those of the lines above its own.
const LAYERS: &[&[&str]] = &[
    &["proto"],
    // How threads are started, and nothing else of the operating system.
    &["log_limit", "sync", "sys::thread"],
    &["planner", "secret"],
    &["settings", "ucx", "net"],
    &["mem"],
    &["sys"],
    &["agent"],
    &["connector"],
    &["ffi"],
    &["fuzzing"],
];

/// The parts of the agent, likewise.
const AGENT_LAYERS: &[&[&str]] = &[
    &["agent::core", "agent::thread"],
    &["agent::command", "agent::metrics_file", "agent::revocation", "agent::rpc"],
    &["agent::peers", "agent::progress_thread"],
    &["agent::transfers"],
    &["agent::paths"],
    &["agent::engine"],
    &["agent::handle", "agent::fuzzing"],
];

/// The parts of `proto`, likewise. Messages are made of what stands below them, and plans of ranks' metadata.
const PROTO_LAYERS: &[&[&str]] = &[
    &["proto::error"],
    &["proto::ids", "proto::latest", "proto::time", "proto::wire::cause", "proto::wire::limits", "proto::wire::region"],
    &["proto::geometry", "proto::stats", "proto::wire::blocks"],
    &["proto::wire::metadata"],
    &["proto::plan"],
    &["proto::wire"],
    &["proto::aggregate", "proto::handshake"],
    &["proto::scheduler", "proto::worker"],
    &["proto::shape"],
];

/// Modules without `unsafe`, which the compiler sees to.
const FORBID_UNSAFE: &[&str] = &["proto", "planner", "secret", "settings", "net", "agent", "connector"];

/// Text that only the modules named with it may have.
const CONFINED: &[(&str, &[&str])] = &[
    ("ucx_sys::", &["ucx"]),
    ("unsafe ", &["ucx", "mem", "sys", "ffi"]),
    // Threads are started by `sys::thread::spawn`, which keeps the process's signals off them.
    ("thread::Builder", &["sys"]),
    ("thread::{Builder", &["sys"]),
    ("thread::spawn(", &["sys"]),
];

/// Modules that do no I/O, read no clock and start no thread.
const PURE: &[&str] = &["planner", "proto"];

/// Text that these may not have.
const IMPURE: &[&str] =
    &["std::thread", "std::net", "std::fs", "std::process", "Instant::now", "SystemTime", "zmq::", "libc::", "cudarc"];

/// The code of each module by its path, such as `agent::peers::hello`: without comments and unit tests.
type Sources = BTreeMap<String, String>;
/// What each module imports: the names, each with its path.
type Names = BTreeMap<String, BTreeMap<String, String>>;
type Graph = BTreeMap<String, BTreeSet<String>>;

/// The code of a file, without comments and unit tests.
fn code(text: &str) -> String {
    let tests = text.find("#[cfg(test)]\n#[allow").or_else(|| text.find("#[cfg(test)]\nmod tests"));
    let text = tests.map_or(text, |at| &text[..at]);
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

fn read(folder: &Path, module: &str, sources: &mut Sources) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let inner = if module.is_empty() { stem.clone() } else { format!("{module}::{stem}") };
        if path.is_dir() {
            read(&path, &inner, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") && stem != "tests" {
            let name = if stem == "mod" || stem == "lib" { module.to_owned() } else { inner };
            sources.insert(name, code(&fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Whether a module is another one or stands within it.
fn is_within(inner: &str, outer: &str) -> bool {
    outer.is_empty() || inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The paths of a `use`, such as `a::{b, c::d as e}`, each whole and with the name that it brings.
fn expand(tree: &str) -> Vec<(String, String)> {
    let Some(open) = tree.find('{') else {
        let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias)));
        // A long path may go on in the next line.
        let path: String = path.split_whitespace().collect();
        let path = path.strip_suffix("::self").unwrap_or(&path);
        let name = alias.map_or_else(|| path.rsplit("::").next().unwrap_or_default(), str::trim);
        return vec![(name.to_owned(), path.to_owned())];
    };
    let (head, body) = (&tree[..open], &tree[open + 1..tree.rfind('}').expect("a brace that is closed")]);
    let (mut depth, mut begin, mut parts) = (0, 0, Vec::new());
    for (at, letter) in body.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&body[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&body[begin..]);
    let parts = parts.into_iter().map(str::trim).filter(|part| !part.is_empty());
    parts.flat_map(|part| expand(&format!("{}{part}", head.trim()))).collect()
}

/// The names that a module's code imports, each with its path.
fn imports(code: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (at, _) in code.match_indices("use ") {
        let line = code[..at].rfind('\n').map_or(0, |at| at + 1);
        let before = code[line..at].trim();
        if before.is_empty() || before.starts_with("pub") {
            let tree = code[at + 4..].split(';').next().unwrap_or_default();
            // A line of a text may begin with that word, too.
            if tree
                .chars()
                .all(|letter| letter.is_alphanumeric() || letter.is_whitespace() || "_:{},*".contains(letter))
            {
                found.extend(expand(tree));
            }
        }
    }
    found
}

/// The paths that a module's code names, such as `crate::a::B`, `super::c` or `imported::d`.
fn paths(code: &str) -> impl Iterator<Item = &str> {
    let words = code.split(|letter: char| !(letter.is_alphanumeric() || "_:".contains(letter)));
    words.map(|word| word.trim_matches(':')).filter(|word| word.contains("::"))
}

/// The module that a path of `from`'s code leads to, if it is one of the sources: where the thing is defined, not where
/// it is exported again.
fn target(from: &str, path: &str, names: &Names) -> Option<String> {
    let mut parts: Vec<&str> = if from.is_empty() { Vec::new() } else { from.split("::").collect() };
    let mut steps = path.split("::").peekable();
    match *steps.peek()? {
        "crate" => {
            parts.truncate(usize::from(is_within(from, "proto")));
            steps.next();
        }
        "kvferry_proto" => {
            parts = vec!["proto"];
            steps.next();
        }
        "self" => drop(steps.next()),
        "super" => {
            while steps.next_if_eq(&"super").is_some() {
                parts.pop();
            }
        }
        first => {
            // A submodule, something imported, or another crate.
            let inner = parts.iter().copied().chain([first]).collect::<Vec<_>>().join("::");
            if !names.contains_key(&inner) {
                let imported = names[from].get(first).filter(|path| !path.starts_with(first))?;
                return target(from, &path.replacen(first, imported, 1), names);
            }
        }
    }
    parts.extend(steps);
    let (len, module) = (0..=parts.len())
        .rev()
        .map(|len| (len, parts[..len].join("::")))
        .find(|(_, module)| names.contains_key(module))?;
    let exported = parts.get(len).and_then(|name| names[&module].get(*name));
    let inner = exported.and_then(|path| target(&module, path, names));
    Some(inner.unwrap_or(module))
}

/// Which modules each module imports, those within it left out, and the crate's root.
fn graph(sources: &Sources) -> Graph {
    let names: Names = sources.iter().map(|(module, code)| (module.clone(), imports(code))).collect();
    let edges = |(from, code): (&String, &String)| {
        let imported = names[from].values().map(String::as_str);
        let targets = imported.chain(paths(code)).filter_map(|path| target(from, path, &names));
        (from.clone(), targets.filter(|to| !is_within(to, from) && !to.is_empty()).collect())
    };
    sources.iter().map(edges).collect()
}

/// Imports that do not point down a table of layers.
fn upward(graph: &Graph, layers: &[&[&'static str]]) -> Vec<String> {
    let place = |module: &str| {
        let part = |parts: &[&'static str]| parts.iter().copied().find(|part| is_within(module, part));
        layers.iter().enumerate().find_map(|(layer, parts)| Some((layer, part(parts)?)))
    };
    let mut wrong = Vec::new();
    for (from, targets) in graph {
        for to in targets {
            if let (Some((above, a)), Some((below, b))) = (place(from), place(to))
                && a != b
                && above <= below
            {
                wrong.push(format!("{from} imports {to}"));
            }
        }
    }
    wrong
}

/// Modules under `root` that stand in no layer.
fn unplaced(sources: &Sources, root: &str, layers: &[&[&str]]) -> Vec<String> {
    let depth = if root.is_empty() { 1 } else { root.split("::").count() + 1 };
    let within = |module: &&String| is_within(module, root) && module.split("::").count() == depth && *module != root;
    let placed = |module: &&String| !module.is_empty() && !layers.concat().contains(&module.as_str());
    sources.keys().filter(within).filter(placed).cloned().collect()
}

/// The modules that import each other in a circle, one list for each circle.
fn circles(graph: &Graph) -> Vec<Vec<String>> {
    let reach = |from: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            for to in graph.get(module).into_iter().flatten() {
                if seen.insert(to) {
                    next.push(to);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<&String>> = graph.keys().map(|module| (module, reach(module))).collect();
    let mut found = BTreeSet::new();
    for (module, to) in &reached {
        if to.contains(module) {
            let members = to.iter().filter(|other| reached.get(*other).is_some_and(|back| back.contains(module)));
            found.insert(members.map(|member| (*member).clone()).collect::<Vec<_>>());
        }
    }
    found.into_iter().collect()
}

fn sources() -> Sources {
    let mut sources = Sources::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    read(&root.join("src"), "", &mut sources);
    read(&root.join("proto/src"), "proto", &mut sources);
    sources
}

fn made_up(files: &[(&str, &str)]) -> Graph {
    graph(&files.iter().map(|(module, text)| ((*module).to_owned(), code(text))).collect())
}

#[test]
fn imports_point_down_the_layers() {
    let sources = sources();
    assert!(sources.len() > 100, "the sources were found");
    let graph = graph(&sources);
    for (root, layers) in [("", LAYERS), ("agent", AGENT_LAYERS), ("proto", PROTO_LAYERS)] {
        assert_eq!(unplaced(&sources, root, layers), Vec::<String>::new(), "modules without a layer");
        assert_eq!(upward(&graph, layers), Vec::<String>::new(), "imports that do not point down");
    }
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    assert_eq!(circles(&graph(&sources())), Vec::<Vec<String>>::new());
}

#[test]
fn unsafe_code_and_the_outside_stay_where_they_belong() {
    let sources = sources();
    for module in FORBID_UNSAFE {
        let code = sources.get(*module).unwrap();
        assert!(code.contains("#![forbid(unsafe_code)]"), "{module} may be unsafe");
    }
    for (module, code) in &sources {
        let top = module.split("::").next().unwrap_or_default();
        for (text, only) in CONFINED {
            assert!(only.contains(&top) || !code.contains(text), "{module} has {text:?}, which only {only:?} may");
        }
        for text in IMPURE {
            assert!(!PURE.contains(&top) || !code.contains(text), "{module} has {text:?}");
        }
    }
}

#[test]
fn an_import_that_points_up_is_found_however_it_is_written() {
    for import in [
        "use crate::agent::engine::Engine;",
        "use crate::{error::Error, agent::{core::ids, engine::{self, dispatch}}};",
        "use super::engine::Engine as E;",
        "pub(crate) use super::\n    engine::Engine;",
        "fn f(e: &crate::agent::engine::Engine) {}",
    ] {
        let graph = made_up(&[
            ("agent", "mod engine; mod peers;"),
            ("agent::core::ids", ""),
            ("agent::engine", "use super::peers::Peers;"),
            ("agent::peers", import),
            ("error", ""),
        ]);
        assert_eq!(upward(&graph, AGENT_LAYERS), ["agent::peers imports agent::engine"], "{import}");
        assert_eq!(circles(&graph), [["agent::engine", "agent::peers"]], "{import}");
    }
    let up = made_up(&[("secret", "use crate::ffi::status;"), ("ffi::status", "")]);
    assert_eq!(upward(&up, LAYERS), ["secret imports ffi::status"]);
    for import in ["use crate::worker::Worker;", "use super::worker::Worker;", "fn f(w: crate::Worker) {}"] {
        let up = made_up(&[
            ("proto", "pub mod plan;\npub mod worker;\npub use worker::Worker;"),
            ("proto::plan", import),
            ("proto::worker", ""),
        ]);
        assert_eq!(upward(&up, PROTO_LAYERS), ["proto::plan imports proto::worker"], "{import}");
    }
    let beside = made_up(&[("agent::rpc", "use super::command::Shared;"), ("agent::command", ""), ("agent", "")]);
    assert_eq!(upward(&beside, AGENT_LAYERS), ["agent::rpc imports agent::command"]);
}

#[test]
fn a_circle_is_found_through_another_name_and_through_a_parent() {
    let again = made_up(&[
        ("proto", ""),
        ("proto::wire", "mod codec;\nmod message;\npub use codec::decode;\npub use message::{Kind as K, Message};"),
        ("proto::wire::codec", "fn begins<M: super::K>() {}"),
        ("proto::wire::message", "use crate::wire;\nfn from() { wire::decode() }"),
    ]);
    assert_eq!(circles(&again), [["proto::wire::codec", "proto::wire::message"]]);
    let parent = made_up(&[
        ("mem", "mod host;\nuse crate::sys::Page;"),
        ("mem::host", "use super::Range;"),
        ("sys", "use crate::mem::host;"),
    ]);
    assert_eq!(circles(&parent), [["mem", "mem::host", "sys"]]);
}

#[test]
fn names_that_a_crate_exports_again_lead_to_their_files() {
    for import in ["use crate::error::Result;", "use crate::{proto::error::Error};", "use kvferry_proto::ErrorKind;"] {
        let graph = made_up(&[
            ("", "pub use kvferry_proto as proto;\npub use kvferry_proto::error;"),
            ("net", import),
            ("proto", "pub mod error;\npub use error::{Error, ErrorKind};"),
            ("proto::error", ""),
        ]);
        assert_eq!(graph["net"], BTreeSet::from(["proto::error".to_owned()]), "{import}");
    }
}

#[test]
fn what_is_allowed_is_not_found() {
    let graph = made_up(&[
        ("agent", "pub use engine::Engine;"),
        ("agent::engine", "mod dispatch;\nuse super::peers;\nuse std::fmt;\n// use super::handle;\n"),
        ("agent::engine::dispatch", "use super::Engine;"),
        ("agent::handle", "use super::engine::Engine;"),
        ("agent::peers", "\n#[cfg(test)]\nmod tests { use crate::agent::engine::Engine; }"),
    ]);
    assert_eq!(upward(&graph, AGENT_LAYERS), Vec::<String>::new());
    assert_eq!(circles(&graph), Vec::<Vec<String>>::new());
    let sources = BTreeMap::from([("agent::new".to_owned(), String::new()), ("agent".to_owned(), String::new())]);
    assert_eq!(unplaced(&sources, "agent", AGENT_LAYERS), ["agent::new"]);
}
