//! What every key is, and which value it has in this process.

use serde::Serialize;
use serde_json::Value;

use super::check::{nearest, unknown};
use super::parse::{default_value, given, is_given};
use super::{DEVELOPMENT, Default, Giver, Kind, Setting, TABLE};
use crate::error::{Error, Result};

/// Fields of vLLM's `KVTransferConfig` that are taken for keys of its `kv_connector_extra_config`.
const BESIDE: [&str; 6] = [
    "kv_connector",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_module_path",
    "kv_connector_extra_config",
    "kv_buffer_device",
];

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Described {
    /// The key.
    pub key: &'static str,
    /// Whose configuration it is in.
    pub parts: Vec<&'static str>,
    /// `operator`, `program` or `environment`: who sets it.
    pub giver: &'static str,
    /// What values it takes, in words.
    pub r#type: String,
    /// Of a number.
    pub unit: &'static str,
    /// The default; nil where there is none.
    pub default: Value,
    /// What holds where there is no default value: `required`, or words.
    pub otherwise: &'static str,
    /// The value in effect; nil where there is none.
    pub value: Value,
    /// Where it comes from: `given`, `environment` or `default`.
    pub source: &'static str,
    /// The environment variable; nil where there is none.
    pub variable: Option<String>,
    /// What it means.
    pub help: &'static str,
    /// True for a key that has no effect and is accepted with a warning.
    pub is_retired: bool,
}

/// An environment variable with the library's prefix that nothing reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// Its name.
    pub name: String,
    /// The name that may be meant.
    pub nearest: Option<String>,
}

/// All keys, and what is set in vain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// All keys, in the table's order.
    pub settings: Vec<Described>,
    /// Variables that nothing reads.
    pub unknown_variables: Vec<Unknown>,
}

impl Setting {
    fn type_name(&self) -> String {
        match self.kind {
            Kind::Text => "text".to_owned(),
            Kind::Path => "path".to_owned(),
            Kind::Flag => "true, false".to_owned(),
            Kind::Whole(low, high) => format!("{low} to {high}"),
            Kind::Choice(choices) => choices.join(", "),
            Kind::Ucx => "map".to_owned(),
            Kind::Other(what) => what.to_owned(),
        }
    }

    /// The key with `given` in effect, else what the environment or the default says.
    fn described(&self, given: Option<Value>, environment: Option<Value>) -> Described {
        let default = default_value(self).unwrap_or(Value::Null);
        let (value, source) = match (given, environment) {
            (Some(value), _) => (value, "given"),
            (None, Some(value)) => (value, "environment"),
            (None, None) => (default.clone(), "default"),
        };
        Described {
            key: self.key,
            parts: self.parts.iter().map(|part| part.name()).collect(),
            giver: match self.giver {
                Giver::Operator | Giver::OperatorWithoutVariable => "operator",
                Giver::Program => "program",
                Giver::Environment => "environment",
            },
            r#type: self.type_name(),
            unit: self.unit,
            default,
            otherwise: match self.default {
                Default::Required => "required",
                Default::Absent(text) => text,
                _ => "",
            },
            value,
            source,
            variable: self.variable(),
            help: self.help,
            is_retired: self.is_retired,
        }
    }
}

fn operators(setting: &Setting) -> bool {
    matches!(setting.giver, Giver::Operator | Giver::OperatorWithoutVariable)
}

/// The keys of an operator, of agents alone left out: what `kv_connector_extra_config` may have.
fn connectors(setting: &&Setting) -> bool {
    use super::Part::{Connector, Scheduler, Worker};
    operators(setting) && setting.parts.iter().any(|part| matches!(part, Worker | Scheduler | Connector))
}

/// Every key with its default and no value of this process: what a document shows.
pub fn describe_all() -> Vec<Described> {
    TABLE.iter().map(|setting| setting.described(None, None)).collect()
}

/// Checks `msgpack`, a map as in vLLM's `kv_connector_extra_config`, and describes every key with the value that it
/// has in an engine of this process's environment. `place` names the map in errors. No bytes are an empty map.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for the first key or variable that is wrong.
pub fn describe(place: &str, msgpack: &[u8]) -> Result<Description> {
    let given = given(place, msgpack)?;
    for key in given.keys() {
        if TABLE.iter().filter(connectors).any(|setting| setting.key == key) {
            continue;
        }
        return Err(match TABLE.iter().find(|setting| setting.key == key).map(|setting| setting.giver) {
            Some(Giver::Program) => {
                Error::invalid(format!("{place} has the key {key:?}, which the engine sets itself; leave it out"))
            }
            Some(Giver::Environment) => Error::invalid(format!(
                "{place} has the key {key:?}, which only the environment variable KVFERRY_{} sets",
                key.to_ascii_uppercase()
            )),
            Some(_) => Error::invalid(format!(
                "{place} has the key {key:?}, which is for agents without a connector; leave it out"
            )),
            None if BESIDE.contains(&key.as_str()) => Error::invalid(format!(
                "{place} has the key {key:?}, which belongs beside it, into vLLM's kv-transfer-config itself"
            )),
            None => unknown(place, key, &TABLE.iter().filter(connectors).map(|s| s.key).collect::<Vec<_>>()),
        });
    }
    let settings = TABLE.iter().map(|setting| {
        let given = given.get(setting.key).filter(|value| connectors(&setting) && is_given(setting, value));
        let given = given.map(|value| setting.checked(&format!("{place}: {}", setting.key), value)).transpose()?;
        Ok(setting.described(given, setting.in_environment(|name| std::env::var_os(name))?))
    });
    Ok(Description { settings: settings.collect::<Result<_>>()?, unknown_variables: unknown_variables() })
}

fn unknown_variables() -> Vec<Unknown> {
    let known: Vec<String> = TABLE.iter().filter_map(Setting::variable).collect();
    let developers = |name: &str| {
        DEVELOPMENT.iter().any(|(known, _)| name == *known || (known.ends_with('_') && name.starts_with(known)))
    };
    let mut found: Vec<Unknown> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("KVFERRY_") && !known.contains(name) && !developers(name))
        .map(|name| Unknown { nearest: nearest(&name, known.iter().map(String::as_str)).map(str::to_owned), name })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}
