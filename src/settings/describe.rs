//! Describes every key, with its value in this process.

use serde::Serialize;
use serde_json::Value;

use super::check::{nearest, unknown};
use super::parse::{default_value, given};
use super::{DEVELOPMENT, DefaultValue, SetBy, Setting, TABLE, ValueKind};
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
pub struct DescribedSetting {
    /// The key.
    pub key: &'static str,
    /// Whose configuration it is in.
    pub parts: Vec<&'static str>,
    /// The party that sets it: `operator`, `program` or `environment`.
    pub giver: &'static str,
    /// The values that it takes, in words.
    pub r#type: String,
    /// The unit of a number.
    pub unit: &'static str,
    /// The default; nil where there is none.
    pub default: Value,
    /// The effect without a default value: `required`, or words.
    pub otherwise: &'static str,
    /// The value in effect; nil where there is none.
    pub value: Value,
    /// Where it comes from: `given`, `environment` or `default`.
    pub source: &'static str,
    /// The environment variable; nil where there is none.
    pub variable: Option<String>,
    /// The key's earlier name, where the value was given under it.
    pub former: Option<&'static str>,
    /// Its meaning.
    pub help: &'static str,
    /// True for a key that has no effect and is accepted with a warning.
    pub is_retired: bool,
}

/// An environment variable with the library's prefix that nothing reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnknownVariable {
    /// Its name.
    pub name: String,
    /// The name that may be meant.
    pub nearest: Option<String>,
}

/// All keys, and what is set in vain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SettingsDescription {
    /// All keys, in the table's order.
    pub settings: Vec<DescribedSetting>,
    /// Variables that nothing reads.
    pub unknown_variables: Vec<UnknownVariable>,
}

impl Setting {
    fn type_name(&self) -> String {
        match self.kind {
            ValueKind::Text => "text".to_owned(),
            ValueKind::Path => "path".to_owned(),
            ValueKind::Flag => "true, false".to_owned(),
            ValueKind::Whole(low, high) => format!("{low} to {high}"),
            ValueKind::Choice(choices) => choices.join(", "),
            ValueKind::Ucx => "map".to_owned(),
            ValueKind::Other(what) => what.to_owned(),
        }
    }

    /// The key with `given` in effect, else what the environment or the default says. Both come with their names.
    fn described(
        &self,
        given: Option<(&'static str, Value)>,
        environment: Option<(&'static str, Value)>,
    ) -> DescribedSetting {
        let default = default_value(self).unwrap_or(Value::Null);
        let ((name, value), source) = match (given, environment) {
            (Some(found), _) => (found, "given"),
            (None, Some(found)) => (found, "environment"),
            (None, None) => ((self.key, default.clone()), "default"),
        };
        DescribedSetting {
            key: self.key,
            parts: self.parts.iter().map(|part| part.name()).collect(),
            giver: match self.giver {
                SetBy::Operator | SetBy::OperatorWithoutVariable => "operator",
                SetBy::Program => "program",
                SetBy::Environment => "environment",
            },
            r#type: self.type_name(),
            unit: self.unit,
            default,
            otherwise: match self.default {
                DefaultValue::Required => "required",
                DefaultValue::Absent(text) => text,
                _ => "",
            },
            value,
            source,
            variable: self.variable(),
            former: (name != self.key).then_some(name),
            help: self.help,
            is_retired: self.is_retired,
        }
    }
}

fn operators(setting: &Setting) -> bool {
    matches!(setting.giver, SetBy::Operator | SetBy::OperatorWithoutVariable)
}

/// The keys of an operator, of agents alone left out: what `kv_connector_extra_config` may have.
fn connectors(setting: &&Setting) -> bool {
    use super::Component::{Connector, Scheduler, Worker};
    operators(setting) && setting.parts.iter().any(|part| matches!(part, Worker | Scheduler | Connector))
}

/// Every key with its default and no value of this process: what a document shows.
pub fn describe_all() -> Vec<DescribedSetting> {
    TABLE.iter().map(|setting| setting.described(None, None)).collect()
}

/// Checks `msgpack` and describes every key. It is a map as in vLLM's `kv_connector_extra_config`; each key has the
/// value that it has in an engine of this process's environment. `place` names the map in errors. No bytes are an
/// empty map.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for the first key or variable that is wrong.
pub fn describe(place: &str, msgpack: &[u8]) -> Result<SettingsDescription> {
    let given = given(place, msgpack)?;
    for key in given.keys() {
        if TABLE.iter().filter(connectors).any(|setting| setting.names().any(|name| name == key)) {
            continue;
        }
        return Err(match TABLE.iter().find(|setting| setting.key == key).map(|setting| setting.giver) {
            Some(SetBy::Program) => {
                Error::invalid(format!("{place} has the key {key:?}, which the engine sets itself; leave it out"))
            }
            Some(SetBy::Environment) => Error::invalid(format!(
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
        let given = if connectors(&setting) { setting.in_map(place, &given)? } else { None };
        Ok(setting.described(given, setting.in_environment(|name| std::env::var_os(name))?))
    });
    Ok(SettingsDescription { settings: settings.collect::<Result<_>>()?, unknown_variables: unknown_variables() })
}

fn unknown_variables() -> Vec<UnknownVariable> {
    let known: Vec<String> = TABLE.iter().flat_map(Setting::variables).collect();
    let developers = |name: &str| {
        DEVELOPMENT.iter().any(|(known, _)| name == *known || (known.ends_with('_') && name.starts_with(known)))
    };
    let mut found: Vec<UnknownVariable> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("KVFERRY_") && !known.contains(name) && !developers(name))
        .map(|name| UnknownVariable {
            nearest: nearest(&name, known.iter().map(String::as_str)).map(str::to_owned),
            name,
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}
