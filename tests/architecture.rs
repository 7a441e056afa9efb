//! The layers of `src`, read from what its files import.
//!
//! docs/architecture.md says what the layers are for. Submodules and their parent may name each other; any other two files
//! may not import each other in a circle. Unit tests, which stand last in a file, may import what they like.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The top modules, from the bottom up. A module imports those of the lines above its own.
const LAYERS: &[&[&str]] = &[
    &["error"],
    &["log_limit", "sync"],
    &["proto", "secret"],
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
    &["agent::command", "agent::rpc"],
    &["agent::peers"],
    &["agent::transfers", "agent::streams"],
    &["agent::paths"],
    &["agent::engine"],
    &["agent::handle", "agent::fuzzing"],
];

/// Modules without `unsafe`, which the compiler sees to.
const FORBID_UNSAFE: &[&str] = &["proto", "secret", "settings", "net", "agent", "connector"];

/// Text that only the modules named with it may have.
const CONFINED: &[(&str, &[&str])] = &[("ucx_sys::", &["ucx"]), ("unsafe ", &["ucx", "mem", "sys", "ffi"])];

/// Text that `proto` may not have: it does no I/O, reads no clock and starts no thread.
const IMPURE: &[&str] =
    &["std::thread", "std::net", "std::fs", "std::process", "Instant::now", "SystemTime", "zmq::", "libc::", "cudarc"];

/// The code of each module by its path, such as `agent::peers::hello`: without comments and unit tests.
type Sources = BTreeMap<String, String>;
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

/// Whether one module stands within the other.
fn are_related(a: &str, b: &str) -> bool {
    let within = |inner: &str, outer: &str| {
        outer.is_empty() || inner == outer || inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with("::"))
    };
    within(a, b) || within(b, a)
}

/// The paths of a `use`, such as `a::{b, c::d}`, each whole.
fn expand(tree: &str) -> Vec<String> {
    let Some(open) = tree.find('{') else {
        // A long path may go on in the next line.
        return vec![tree.split(" as ").next().unwrap_or(tree).split_whitespace().collect()];
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
    parts.flat_map(expand).map(|part| format!("{}{part}", head.trim())).collect()
}

/// The paths that a module's code imports or names from the crate's root.
fn paths(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
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
    for (at, _) in code.match_indices("crate::") {
        let path = code[at..].split(|letter: char| !(letter.is_alphanumeric() || "_:".contains(letter)));
        found.extend(path.take(1).map(|path| path.trim_end_matches(':').to_owned()));
    }
    found
}

/// The module that a path of `from`'s code leads to, if it is one of the sources.
fn target(from: &str, path: &str, sources: &Sources) -> Option<String> {
    let mut parts: Vec<&str> = if from.is_empty() { Vec::new() } else { from.split("::").collect() };
    let mut steps = path.split("::").peekable();
    match *steps.peek()? {
        "crate" => {
            parts.clear();
            steps.next();
        }
        "self" => drop(steps.next()),
        "super" => {
            while steps.next_if_eq(&"super").is_some() {
                parts.pop();
            }
        }
        first => {
            // A submodule, or another crate.
            let inner = parts.iter().copied().chain([first]).collect::<Vec<_>>().join("::");
            sources.get(&inner)?;
        }
    }
    parts.extend(steps);
    (1..=parts.len()).rev().map(|len| parts[..len].join("::")).find(|module| sources.contains_key(module))
}

/// Which modules each module imports, those within it and around it left out.
fn graph(sources: &Sources) -> Graph {
    let edges = |(from, code): (&String, &String)| {
        let targets = paths(code).into_iter().filter_map(|path| target(from, &path, sources));
        (from.clone(), targets.filter(|to| !are_related(from, to)).collect())
    };
    sources.iter().map(edges).collect()
}

/// Imports that do not point down a table of layers.
fn upward(graph: &Graph, layers: &[&[&str]]) -> Vec<String> {
    let place = |module: &str| {
        let holds = |part: &&str| module == *part || module.strip_prefix(*part).is_some_and(|m| m.starts_with("::"));
        layers.iter().enumerate().find_map(|(layer, parts)| Some((layer, *parts.iter().find(|part| holds(part))?)))
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
    let within = |module: &&String| are_related(module, root) && module.split("::").count() == depth && *module != root;
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
    read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), "", &mut sources);
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
    for (root, layers) in [("", LAYERS), ("agent", AGENT_LAYERS)] {
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
            assert!(top != "proto" || !code.contains(text), "{module} has {text:?}");
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
    let up = made_up(&[("proto::wire", "use crate::ffi::status;"), ("ffi::status", "")]);
    assert_eq!(upward(&up, LAYERS), ["proto::wire imports ffi::status"]);
    let beside =
        made_up(&[("agent::transfers", "use super::streams::Streams;"), ("agent::streams", ""), ("agent", "")]);
    assert_eq!(upward(&beside, AGENT_LAYERS), ["agent::transfers imports agent::streams"]);
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
