//! The table of keys: what is parsed has its defaults, and the documents show it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use kvferry::agent::AgentConfig;
use kvferry::connector::{SchedulerConfig, WorkerConfig};
use kvferry::proto::ids::EngineId;
use kvferry::settings::{
    Component, DEVELOPMENT, DefaultValue, DescribedSetting, TABLE, describe, describe_all, of, parse_config,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

const DOCUMENT: &str = "docs/configuration.md";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn packed(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec_named(value).unwrap()
}

#[test]
fn keys_and_variables_are_told_apart() {
    let mut seen = BTreeSet::new();
    for setting in TABLE {
        for part in setting.parts {
            assert!(seen.insert((setting.key, part.name())), "{} twice in {}", setting.key, part.name());
        }
        assert!(setting.help.ends_with('.'), "{}", setting.key);
    }
    for part in [
        Component::Agent,
        Component::Worker,
        Component::Scheduler,
        Component::Listener,
        Component::Aggregator,
        Component::Connector,
    ] {
        assert!(of(part).count() > 1, "{}", part.name());
    }
}

#[test]
fn a_map_of_an_operator_is_checked_and_described() {
    let described = describe("extra", &packed(&json!({"port": 0, "transport": "tcp", "ucx": {"A": 1}}))).unwrap();
    let of = |key: &str| described.settings.iter().find(|setting| setting.key == key).unwrap();
    assert_eq!((&of("port").value, of("port").source, &of("port").default), (&json!(0), "given", &json!(5680)));
    assert_eq!(of("ucx").value, json!({"A": "1"}));
    assert_eq!((&of("lease_ms").value, of("lease_ms").source, of("lease_ms").unit), (&json!(30_000), "default", "ms"));
    assert_eq!(of("log").variable.as_deref(), Some("KVFERRY_LOG"));
    assert_eq!((of("streams").is_retired, of("port").is_retired), (true, false));
    assert_eq!((of("engine_id").otherwise, of("engine_id").giver), ("required", "program"));
    for (given, expected) in [
        (json!({"prot": 1}), "extra has an unknown key \"prot\"; did you mean \"port\"?"),
        (json!({"engine_id": "e"}), "\"engine_id\", which the engine sets itself"),
        (json!({"log": "info"}), "only the environment variable KVFERRY_LOG sets"),
        (json!({"spin_us": 1}), "\"spin_us\", which is for agents without a connector"),
        (json!({"port": 65_536}), "extra: port must be a whole number from 0 to 65535, not 65536"),
        (json!(["port"]), "extra is not a map"),
    ] {
        let error = describe("extra", &packed(&given)).unwrap_err();
        assert!(error.message().contains(expected), "{given}: {error}");
    }
    assert!(describe("extra", b"\xc1").is_err());
}

/// Every field of a configuration that a key can fill, with its default.
fn fields(config: impl Serialize) -> Map<String, Value> {
    let Value::Object(mut fields) = serde_json::to_value(config).unwrap() else { panic!("no fields") };
    for held in ["agent", "machine"] {
        if let Some(Value::Object(its)) = fields.remove(held) {
            fields.extend(its);
        }
    }
    fields
}

#[test]
fn every_key_fills_a_field_with_its_default() {
    let engine = EngineId::new("e").unwrap();
    let worker = fields(WorkerConfig::new(engine.clone()));
    for (part, fields) in [
        (Component::Agent, fields(AgentConfig::default())),
        (Component::Worker, worker.clone()),
        (Component::Scheduler, fields(SchedulerConfig::new(engine, Vec::new()))),
    ] {
        let is_retired = |key: &str| of(part).any(|setting| setting.key == key && setting.is_retired);
        for described in describe_all().iter().filter(|described| described.parts.contains(&part.name())) {
            let (key, part) = (described.key, part.name());
            if is_retired(key) {
                continue;
            }
            let value =
                fields.get(key).unwrap_or_else(|| panic!("{key}: no configuration of the {part} has this field"));
            match described.otherwise {
                "" => assert_eq!(value, &described.default, "{part}: {key}"),
                "required" => {}
                _ => assert!(value.is_null() || key == "name", "{part}: {key} is {value}"),
            }
        }
    }
    // Keys that are an agent's alone have their defaults in a worker's configuration too.
    for described in describe_all().iter().filter(|described| described.parts == ["agent"]) {
        assert_eq!(worker.get(described.key), Some(&described.default), "{}", described.key);
    }
}

#[test]
fn the_page_of_leases_has_the_defaults() {
    let page = fs::read_to_string(root().join("docs/protocol-leases.md")).unwrap();
    let mut compared = BTreeSet::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (names, values) =
            (cells[0].split('`').filter(|name| of(Component::Worker).any(|s| s.key == *name)), cells[1]);
        for (name, value) in names.zip(values.split(", ")) {
            let setting = of(Component::Worker).find(|setting| setting.key == name).unwrap();
            assert_eq!(setting.default, DefaultValue::Number(value.parse().unwrap()), "{name}");
            compared.insert(name.to_owned());
        }
    }
    let machine = serde_json::to_value(WorkerConfig::new(EngineId::new("e").unwrap()).machine).unwrap();
    assert_eq!(compared, machine.as_object().unwrap().keys().cloned().collect(), "the page has a row for every one");
}

#[test]
fn a_configuration_is_parsed_with_the_tables_defaults() {
    let complete: Value =
        parse_config(Component::Scheduler, &packed(&json!({"engine_id": "e", "groups": []}))).unwrap();
    for described in describe_all().iter().filter(|d| d.parts.contains(&"scheduler")) {
        let expected = match described.key {
            "engine_id" => json!("e"),
            "groups" => json!([]),
            _ => described.default.clone(),
        };
        assert_eq!(complete.get(described.key).unwrap_or(&Value::Null), &expected, "{}", described.key);
    }
}

// --- the document

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn default_of(setting: &DescribedSetting) -> String {
    match &setting.default {
        Value::Null => setting.otherwise.to_owned(),
        Value::String(text) => format!("`{text}`"),
        value => format!("`{value}`"),
    }
}

/// The type as people read it: choices as code, numbers with their unit.
fn type_of(setting: &DescribedSetting) -> String {
    if setting.r#type.split(", ").count() > 1 && !setting.r#type.contains(' ') || setting.default.is_string() {
        return setting.r#type.split(", ").map(|choice| format!("`{choice}`")).collect::<Vec<_>>().join(", ");
    }
    if setting.unit.is_empty() { setting.r#type.clone() } else { format!("{} {}", setting.r#type, setting.unit) }
}

fn table(settings: &[&DescribedSetting]) -> String {
    let mut text = String::from("| key | in | type | default | meaning |\n| --- | --- | --- | --- | --- |\n");
    for s in settings {
        writeln!(
            text,
            "| `{}` | {} | {} | {} | {} |",
            s.key,
            s.parts.join(", "),
            cell(&type_of(s)),
            cell(&default_of(s)),
            cell(s.help)
        )
        .unwrap();
    }
    text
}

fn variables(settings: &[&DescribedSetting]) -> String {
    let mut text = String::from("| variable | type | default | meaning |\n| --- | --- | --- | --- |\n");
    for s in settings {
        let name = s.variable.as_deref().unwrap();
        writeln!(text, "| `{name}` | {} | {} | {} |", cell(&type_of(s)), cell(&default_of(s)), cell(s.help)).unwrap();
    }
    text
}

fn development() -> String {
    let mut text = String::from("| variable | meaning |\n| --- | --- |\n");
    for (name, help) in DEVELOPMENT {
        let star = if name.ends_with('_') { "*" } else { "" };
        writeln!(text, "| `{name}{star}` | {} |", cell(help)).unwrap();
    }
    text
}

fn replaced(document: &str, name: &str, new: &str) -> String {
    let (start, end) = (format!("<!-- table: {name} -->\n"), "<!-- end -->".to_owned());
    let from = document.find(&start).unwrap_or_else(|| panic!("{DOCUMENT} has no {start}")) + start.len();
    let to = from + document[from..].find(&end).expect("an end");
    format!("{}\n{new}\n{}", &document[..from], &document[to..])
}

#[test]
fn the_document_shows_the_table() {
    let all = describe_all();
    let of = |keep: &dyn Fn(&DescribedSetting) -> bool| all.iter().filter(|s| keep(s)).collect::<Vec<_>>();
    let connector =
        |s: &DescribedSetting| s.parts.iter().any(|part| ["worker", "scheduler", "connector"].contains(part));
    let path = root().join(DOCUMENT);
    let before = fs::read_to_string(&path).unwrap();
    let mut after = replaced(&before, "operator", &table(&of(&|s| s.giver == "operator" && connector(s))));
    after = replaced(&after, "agent", &table(&of(&|s| s.giver == "operator" && !connector(s))));
    after = replaced(&after, "environment", &variables(&of(&|s| s.giver == "environment")));
    after = replaced(&after, "program", &table(&of(&|s| s.giver == "program")));
    after = replaced(&after, "development", &development());
    if std::env::var_os("KVFERRY_BLESS").is_some() {
        fs::write(&path, &after).unwrap();
        return;
    }
    assert!(
        before == after,
        "{DOCUMENT} is stale: run `KVFERRY_BLESS=1 cargo test --test tree settings` and commit it"
    );
}

// --- variables in the sources

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_symlink() || name.starts_with('.') || name == "target" || name == "__pycache__" {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// The words of `text` that begin with the library's prefix.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
        .filter(|word| word.strip_prefix("KVFERRY_").is_some_and(|rest| !rest.is_empty()))
}

#[test]
fn every_variable_in_the_sources_is_in_the_table() {
    let known: BTreeSet<String> = TABLE.iter().flat_map(|setting| setting.variables()).collect();
    // Include guards, a constant of a script, and a key of a Ray Serve configuration.
    let others = ["KVFERRY_H", "KVFERRY_TEST_CHECK_H", "KVFERRY_OPTIONS", "KVFERRY_PORT_BASE"];
    let mut files = Vec::new();
    sources(root(), &mut files);
    let mut heard = BTreeSet::new();
    for file in files {
        // Tests of settings name variables that do not exist, on purpose.
        let tests = ["tests/settings.rs", "tests/python/test_settings.py", "src/settings/parse.rs"];
        if tests.iter().any(|test| file.ends_with(test)) {
            continue;
        }
        let Ok(text) = fs::read_to_string(&file) else { continue };
        for word in words(&text) {
            let developers =
                DEVELOPMENT.iter().any(|(name, _)| word == *name || name.ends_with('_') && word.starts_with(name));
            assert!(
                known.contains(word) || developers || others.contains(&word) || word == "KVFERRY_",
                "{}: {word} is in no table of src/settings/table.rs",
                file.display()
            );
            heard.insert(word.to_owned());
        }
    }
    for (name, _) in DEVELOPMENT {
        assert!(heard.iter().any(|word| word.starts_with(name)), "{name} is read nowhere");
    }
}
