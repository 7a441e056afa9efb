//! From the msgpack map of a caller to a complete configuration.

use std::ffi::OsString;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::check::unknown;
use super::{Component, DefaultValue, NESTED, Setting, ValueKind, of};
use crate::error::{Error, Result};

/// The largest configuration accepted, in bytes.
const MAX_BYTES: usize = 1 << 20;

/// Decodes and checks the configuration of `part`, and completes it. Missing values come from the environment and
/// then from the table's defaults. No bytes are an empty map.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] naming the key or the environment variable, what was found and what was
/// expected; for an unknown key the nearest known one.
pub fn parse_config<T: DeserializeOwned>(part: Component, msgpack: &[u8]) -> Result<T> {
    let place = format!("the {} configuration", part.name());
    let given = given(&place, msgpack)?;
    let warn = |text: String| log::warn!("{text}");
    read(part, complete(part, &place, given, |variable| std::env::var_os(variable), warn)?)
}

/// The configuration of `part` with `required` and every other key at its default. The environment is ignored.
#[must_use]
pub fn defaults<T: DeserializeOwned>(part: Component, required: Map<String, Value>) -> T {
    let completed = complete(part, "the defaults", required, |_| None, |_| {}).and_then(|values| read(part, values));
    // Nothing of it comes from outside, and `cargo test --test tree settings` reads the defaults of every part.
    #[allow(clippy::expect_used)]
    completed.expect("every row of the table has a default that its field takes")
}

/// The values, which are complete, as the fields of a configuration.
fn read<T: DeserializeOwned>(part: Component, mut values: Map<String, Value>) -> Result<T> {
    if part == Component::Worker {
        let mut held = values.clone();
        // No worker is told the keys that are an agent's alone.
        for setting in of(Component::Agent).filter(|setting| !setting.parts.contains(&part)) {
            held.extend(default_value(setting).map(|default| (setting.key.to_owned(), default)));
        }
        values.extend(NESTED.map(|field| (field.to_owned(), Value::Object(held.clone()))));
    }
    serde_path_to_error::deserialize(Value::Object(values)).map_err(|e| {
        let path = e.path().to_string();
        let key = if path == "." { String::new() } else { format!(", key {path:?}") };
        Error::invalid(format!("{} configuration{key}: {}", part.name(), e.inner()))
    })
}

/// The map of keys and values in `msgpack`. `place` names it in errors.
pub(super) fn given(place: &str, msgpack: &[u8]) -> Result<Map<String, Value>> {
    if msgpack.is_empty() {
        return Ok(Map::new());
    }
    if msgpack.len() > MAX_BYTES {
        return Err(Error::invalid(format!("{place} has {} bytes, the limit is {MAX_BYTES}", msgpack.len())));
    }
    // By way of a tree, whose errors say what was found; the msgpack reader's name a marker byte.
    let mut de = rmp_serde::Deserializer::from_read_ref(msgpack);
    de.set_max_depth(crate::proto::wire::MAX_DEPTH);
    let tree = Value::deserialize(&mut de)
        .map_err(|e| Error::invalid(format!("{place} is not msgpack ({e}); expected a map")))?;
    match tree {
        Value::Object(map) => Ok(map),
        other => Err(Error::invalid(format!("{place} is not a map of keys and values: {other}"))),
    }
}

/// The default as a value, if there is one.
pub(super) fn default_value(setting: &Setting) -> Option<Value> {
    match setting.default {
        DefaultValue::Required | DefaultValue::Absent(_) => None,
        DefaultValue::Flag(yes) => Some(Value::Bool(yes)),
        DefaultValue::Number(number) => Some(Value::from(number)),
        DefaultValue::Text(text) => Some(Value::from(text)),
        DefaultValue::Empty if setting.kind == ValueKind::Ucx => Some(Value::Object(Map::new())),
        DefaultValue::Empty => Some(Value::Array(Vec::new())),
    }
}

/// `given` with everything else that `part` has, and without what has no effect, which `warn` is told of.
fn complete(
    part: Component,
    place: &str,
    given: Map<String, Value>,
    environment: impl Fn(&str) -> Option<OsString>,
    mut warn: impl FnMut(String),
) -> Result<Map<String, Value>> {
    for key in given.keys() {
        if !of(part).any(|setting| setting.names().any(|name| name == key)) {
            return Err(unknown(place, key, &of(part).map(|setting| setting.key).collect::<Vec<_>>()));
        }
    }
    let mut complete = Map::new();
    for setting in of(part) {
        let found = match setting.in_map(place, &given)? {
            // Where the variable is read later, an error of the value says that it came from there.
            None if !setting.read_late => setting.in_environment(&environment)?,
            found => found,
        };
        let is_found =
            |former: &&str| given.contains_key(*former) || found.as_ref().is_some_and(|(name, _)| name == former);
        if let Some(former) = setting.former.filter(is_found) {
            let key = setting.key;
            warn(format!("{place}: {former}, or its environment variable, is called {key} now; rename it"));
        }
        let value = found.map(|(_, value)| value).or_else(|| default_value(setting));
        if setting.is_retired {
            if value.is_some() {
                warn(format!("{place}: {}, or its environment variable, has no effect; leave it out", setting.key));
            }
        } else if let Some(value) = value {
            complete.insert(setting.key.to_owned(), value);
        }
    }
    Ok(complete)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use serde_json::json;

    use super::*;

    fn completed(part: Component, given: Value, environment: &[(&str, &str)]) -> Result<Map<String, Value>> {
        let look = |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        complete(part, "the configuration", given.as_object().unwrap().clone(), look, |text| panic!("{text}"))
    }

    #[test]
    fn what_has_no_effect_is_checked_left_out_and_warned_of_once() {
        for (given, variable, expected) in [
            (json!({"streams": false}), "", 1),
            (json!({}), "no", 1),
            (json!({"streams": true}), "yes", 1),
            (json!({"streams": null}), "", 0),
            (json!({}), "", 0),
        ] {
            for part in [Component::Agent, Component::Worker] {
                let look = |name: &str| (name == "KVFERRY_STREAMS").then(|| variable.into());
                let mut warnings = Vec::new();
                let given = given.as_object().unwrap().clone();
                let got = complete(part, "the configuration", given, look, |text| warnings.push(text)).unwrap();
                assert_eq!(got.get("streams"), None);
                assert_eq!(warnings.len(), expected, "{warnings:?}");
                let said =
                    |text: &String| text.starts_with("the configuration: streams, ") && text.contains("no effect");
                assert!(warnings.iter().all(said), "{warnings:?}");
            }
        }
        assert!(
            completed(Component::Agent, json!({"streams": "perhaps"}), &[])
                .unwrap_err()
                .message()
                .contains("true or false")
        );
    }

    #[test]
    fn a_former_name_is_taken_with_one_warning() {
        for (given, variable, expected) in [
            (json!({"rehearse": false}), "", (false, 1)),
            (json!({}), "no", (false, 1)),
            (json!({"warm_up": true}), "no", (true, 0)),
            (json!({"rehearse": false, "warm_up": true}), "", (true, 1)),
            (json!({}), "", (true, 0)),
        ] {
            for part in [Component::Agent, Component::Worker] {
                let look = |name: &str| (name == "KVFERRY_REHEARSE").then(|| variable.into());
                let mut warnings = Vec::new();
                let given = given.as_object().unwrap().clone();
                let got = complete(part, "the configuration", given, look, |text| warnings.push(text)).unwrap();
                assert_eq!((got.get("warm_up"), got.get("rehearse")), (Some(&json!(expected.0)), None));
                assert_eq!(warnings.len(), expected.1, "{warnings:?}");
                assert!(
                    warnings.iter().all(|text| text.contains("rehearse, or") && text.contains("called warm_up now"))
                );
            }
        }
        let error = completed(Component::Agent, json!({"rehearse": 1}), &[]).unwrap_err();
        assert!(error.message().contains("rehearse must be true or false"), "{error}");
    }

    #[test]
    fn given_beats_the_environment_which_beats_the_default() {
        let environment = [("KVFERRY_LEASE_MS", "5000"), ("KVFERRY_PORT", "7000"), ("KVFERRY_ADVERTISE_LOCAL", "yes")];
        let got = completed(Component::Scheduler, json!({"port": 1, "host": null}), &environment).unwrap();
        let values = |key: &str| got.get(key).cloned();
        assert_eq!(values("port"), Some(json!(1)));
        assert_eq!(values("lease_ms"), Some(json!(5000)));
        assert_eq!(values("advertise_local"), Some(json!(true)));
        assert_eq!(values("null_block"), Some(json!(0)));
        assert_eq!((values("host"), values("key_file"), values("engine_id")), (None, None, None));
        let nil = completed(Component::Scheduler, json!({"null_block": null}), &[]).unwrap();
        assert_eq!(nil.get("null_block"), Some(&Value::Null));
    }

    #[test]
    fn what_is_read_later_is_left_to_it_and_what_the_program_sets_has_no_variable() {
        let environment = [("KVFERRY_UCX_LIB", "/x"), ("KVFERRY_KEY_FILE", "/k"), ("KVFERRY_TP_SIZE", "x")];
        let got = completed(Component::Worker, json!({"ucx_lib": "/y"}), &environment).unwrap();
        assert_eq!(got.get("ucx_lib"), Some(&json!("/y")));
        assert_eq!(got.get("key_file"), None);
        assert_eq!(got.get("tp_size"), Some(&json!(1)));
    }

    #[test]
    fn what_is_wrong_is_named_with_where_it_stood() {
        let mistakes = [
            (
                json!({"lease": 1}),
                &[][..],
                "the configuration has an unknown key \"lease\"; did you mean \"lease_ms\"?",
            ),
            (json!({"zzz": 1}), &[], "unknown key \"zzz\"; the keys are host, port,"),
            (json!({"lease_ms": 1.5}), &[], "lease_ms must be a whole number from 1000 to 86400000 (ms), not 1.5"),
            (json!({"push": 1}), &[], "push must be true or false, not 1"),
            (json!({"host": ""}), &[], "host must be a text that is not empty, not \"\""),
            (json!({}), &[("KVFERRY_PORT", "many")], "variable KVFERRY_PORT must be a whole number from 0 to 65535"),
            (json!({}), &[("KVFERRY_PORT", "-1")], "not \"-1\""),
            (json!({}), &[("KVFERRY_ADVERTISE_LOCAL", "maybe")], "must be true or false, not \"maybe\""),
        ];
        for (given, environment, expected) in mistakes {
            let error = completed(Component::Scheduler, given.clone(), environment).unwrap_err();
            assert!(error.message().contains(expected), "{given}: {error}");
        }
        let mistakes = [
            (json!({"UCX_TLS": "tcp"}), "write \"UCX_TLS\" without its prefix, as \"TLS\""),
            (json!({"TLS": ["tcp"]}), "\"TLS\" must be a text, a number, true or false"),
            (json!("tcp"), "must be a map of UCX settings"),
            (json!("{\"TLS\": tcp}"), "or its JSON as a text, which is damaged: expected"),
            (json!("{\"TLS\": [\"tcp\"]}"), "\"TLS\" must be a text, a number, true or false"),
        ];
        for (given, expected) in mistakes {
            let error = completed(Component::Worker, json!({"ucx": given}), &[]).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
        let got = completed(Component::Worker, json!({"ucx": {"A": true, "B": 8192, "C": "c"}}), &[]).unwrap();
        assert_eq!(got.get("ucx"), Some(&json!({"A": "y", "B": "8192", "C": "c"})));
        let text =
            completed(Component::Agent, json!({"ucx": " {\"A\": true, \"B\": 8192, \"C\": \"c\"}"}), &[]).unwrap();
        assert_eq!(text.get("ucx"), got.get("ucx"));
    }
}
