//! Is this value one that the key takes?

use std::ffi::OsString;
use std::iter;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Component, NESTED, Setting, ValueKind, of};
use crate::error::{Error, Result};

/// How alike two words must be to be taken for one another, by Jaro and Winkler: "lease" and "lease_ms" have 0.93,
/// "host" and "port" 0.67.
const ALIKE: f64 = 0.8;

/// The word of `known` that `word` may be meant to be.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::jaro_winkler(word, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}

/// The error of an unknown `key`: the nearest of `known`, or all of them.
pub(super) fn unknown(place: &str, key: &str, known: &[&str]) -> Error {
    let hint = match nearest(key, known.iter().copied()) {
        Some(close) => format!("; did you mean {close:?}?"),
        None => format!("; the keys are {}", known.join(", ")),
    };
    Error::invalid(format!("{place} has an unknown key {key:?}{hint}"))
}

/// True if a caller has given a value: nil means the default, except where nil is a value.
fn is_given(setting: &Setting, value: &Value) -> bool {
    !value.is_null() || matches!(setting.kind, ValueKind::Other(_))
}

impl Setting {
    /// The expected values, for errors.
    fn expected(&self) -> String {
        match self.kind {
            ValueKind::Text => "a text that is not empty".to_owned(),
            ValueKind::Path => "a path".to_owned(),
            ValueKind::Flag => "true or false".to_owned(),
            ValueKind::Whole(low, high) if self.unit.is_empty() => format!("a whole number from {low} to {high}"),
            ValueKind::Whole(low, high) => format!("a whole number from {low} to {high} ({})", self.unit),
            ValueKind::Choice(choices) => format!("one of {}", choices.join(", ")),
            ValueKind::Ucx => "a map of UCX settings such as {\"TLS\": \"tcp\"}".to_owned(),
            ValueKind::Other(what) => format!("a {what}"),
        }
    }

    fn refused(&self, name: &str, value: &Value) -> Error {
        Error::invalid(format!("{name} must be {}, not {value}", self.expected()))
    }

    /// The value as the configuration takes it. `name` says in an error where it stood.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] with the name, the value and what was expected.
    pub(super) fn checked(&self, name: &str, value: &Value) -> Result<Value> {
        let fits = match self.kind {
            ValueKind::Text => value.as_str().is_some_and(|text| !text.is_empty()),
            ValueKind::Path => value.is_string(),
            ValueKind::Flag => value.is_boolean(),
            ValueKind::Whole(low, high) => value.as_u64().is_some_and(|number| (low..=high).contains(&number)),
            ValueKind::Choice(choices) => value.as_str().is_some_and(|text| choices.contains(&text)),
            ValueKind::Ucx => return self.ucx(name, value),
            ValueKind::Other(_) => true,
        };
        if fits { Ok(value.clone()) } else { Err(self.refused(name, value)) }
    }

    fn ucx(&self, name: &str, value: &Value) -> Result<Value> {
        // NIXL's parameters are texts.
        let parsed = match value {
            Value::String(text) if text.trim_start().starts_with('{') => {
                let parsed: Value = serde_json::from_str(text).map_err(|error| {
                    let expected = self.expected();
                    Error::invalid(format!(
                        "{name} must be {expected}, or its JSON as a text, which is damaged: {error}"
                    ))
                })?;
                Some(parsed)
            }
            _ => None,
        };
        let given = parsed.as_ref().unwrap_or(value).as_object().ok_or_else(|| self.refused(name, value))?;
        let mut settings = Map::new();
        for (key, setting) in given {
            if let Some(bare) = key.strip_prefix("UCX_") {
                return Err(Error::invalid(format!("{name}: write {key:?} without its prefix, as {bare:?}")));
            }
            let text = match setting {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                Value::Bool(yes) => if *yes { "y" } else { "n" }.to_owned(),
                other => {
                    let text = format!("{name}: {key:?} must be a text, a number, true or false, not {other}");
                    return Err(Error::invalid(text));
                }
            };
            settings.insert(key.clone(), Value::String(text));
        }
        Ok(Value::Object(settings))
    }

    /// The value in `given`, if there is one, and the name that it stands under. `place` names the map in errors.
    ///
    /// # Errors
    /// As [`Setting::checked`].
    pub(super) fn in_map(&self, place: &str, given: &Map<String, Value>) -> Result<Option<(&'static str, Value)>> {
        let value_of = |name| Some((name, given.get(name).filter(|value| is_given(self, value))?));
        let Some((name, value)) = self.names().find_map(value_of) else { return Ok(None) };
        Ok(Some((name, self.checked(&format!("{place}: {name}"), value)?)))
    }

    /// The value in the environment, if a variable is set and not empty, and the name that the variable is of.
    ///
    /// # Errors
    /// As [`Setting::checked`].
    pub(super) fn in_environment(
        &self,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<(&'static str, Value)>> {
        let text_of = |key| {
            let variable = self.variable_of(key)?;
            Some((key, get(&variable).filter(|text| !text.is_empty())?, variable))
        };
        let Some((key, text, variable)) = self.names().find_map(text_of) else { return Ok(None) };
        let name = format!("the environment variable {variable}");
        let text =
            text.into_string().map_err(|text| Error::invalid(format!("{name} is not UTF-8: {}", text.display())))?;
        let value = match self.kind {
            ValueKind::Whole(..) => text.parse::<u64>().map_or(Value::String(text), Value::from),
            ValueKind::Flag => match text.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "y" | "on" => Value::Bool(true),
                "false" | "0" | "no" | "n" | "off" => Value::Bool(false),
                _ => Value::String(text),
            },
            _ => Value::String(text),
        };
        Ok(Some((key, self.checked(&name, &value)?)))
    }
}

/// Checks a configuration that a Rust program filled in by hand. Compares the numbers of `part` with the table.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for the first key with a number that is out of its range.
pub fn check<T: Serialize>(part: Component, config: &T) -> Result<()> {
    let tree = serde_json::to_value(config)
        .map_err(|e| Error::invalid(format!("the {} configuration cannot be looked at: {e}", part.name())))?;
    let held = NESTED.iter().filter_map(|field| tree.get(field));
    for fields in iter::once(&tree).chain(held) {
        for setting in of(part).filter(|setting| matches!(setting.kind, ValueKind::Whole(..))) {
            if let Some(value) = fields.get(setting.key).filter(|value| !value.is_null()) {
                setting.checked(setting.key, value)?;
            }
        }
    }
    Ok(())
}
