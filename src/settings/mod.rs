//! Every key that can be configured: one table, from which configurations are parsed and completed, and which
//! `kvferry config` and `docs/configuration.md` show.
//!
//! To add a key, add a row to [`TABLE`], and a field of its name to the configuration of what uses it, which is filled by
//! key. `cargo test --test tree settings` finds a row without its field; `KVFERRY_BLESS=1` with it writes the document's
//! tables.
//!
//! A value that was given wins over the environment variable `KVFERRY_<KEY>`, which wins over the default.

#![forbid(unsafe_code)]

mod check;
mod describe;
mod parse;
mod table;
mod units;

pub use check::check;
pub use describe::{DescribedSetting, SettingsDescription, UnknownVariable, describe, describe_all};
pub use parse::{defaults, parse_config};
pub use table::{DEVELOPMENT, TABLE};
pub use units::{micros, millis};

/// The fields of a worker's configuration that are configurations themselves, and take their keys of the same map.
const NESTED: [&str; 2] = ["agent", "machine"];

/// A part of kvferry that is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// An agent.
    Agent,
    /// A worker.
    Worker,
    /// A scheduler side.
    Scheduler,
    /// A listener alone.
    Listener,
    /// An aggregator.
    Aggregator,
    /// vLLM's connector, which reads these keys itself.
    Connector,
}

impl Component {
    /// The name in errors and descriptions.
    pub fn name(self) -> &'static str {
        match self {
            Component::Agent => "agent",
            Component::Worker => "worker",
            Component::Scheduler => "scheduler",
            Component::Listener => "listener",
            Component::Aggregator => "aggregator",
            Component::Connector => "connector",
        }
    }
}

/// Which values a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// A text that is not empty.
    Text,
    /// A path; an empty one means none, whatever the environment says.
    Path,
    /// True or false.
    Flag,
    /// A whole number from the first to the second, both included.
    Whole(u64, u64),
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A map of UCX settings, by name without the `UCX_` prefix.
    Ucx,
    /// A structure, described by this text and checked where it is used.
    Other(&'static str),
}

/// The value of a key that neither a caller nor the environment gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultValue {
    /// It must be given.
    Required,
    /// This flag.
    Flag(bool),
    /// This number.
    Number(u64),
    /// This text.
    Text(&'static str),
    /// No entries.
    Empty,
    /// No value; the text says what happens.
    Absent(&'static str),
}

/// The party that sets a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetBy {
    /// The operator of the engine: in vLLM's `kv_connector_extra_config`, by the environment variable, or through the
    /// program.
    Operator,
    /// As [`SetBy::Operator`], but there is no variable.
    OperatorWithoutVariable,
    /// The program, which knows what it is: vLLM's connector sets it.
    Program,
    /// The environment variable alone.
    Environment,
}

/// One key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The key in maps; `KVFERRY_` and the key in capitals is the environment variable.
    pub key: &'static str,
    /// Whose configuration it is in. None for what only an environment variable sets.
    pub parts: &'static [Component],
    /// The party that sets it.
    pub giver: SetBy,
    /// Which values it takes.
    pub kind: ValueKind,
    /// The unit of a number; empty for a bare one.
    pub unit: &'static str,
    /// The value where none is given.
    pub default: DefaultValue,
    /// Its meaning: sentences.
    pub help: &'static str,
    /// True if the variable is read where the value is used. Else it is read when a configuration is parsed.
    pub read_late: bool,
    /// True for a key that has no effect and is accepted with a warning.
    pub is_retired: bool,
    /// The key's earlier name, which is accepted with a warning.
    pub former: Option<&'static str>,
}

impl Setting {
    /// The environment variable that sets the key, if one does.
    pub fn variable(&self) -> Option<String> {
        self.variable_of(self.key)
    }

    /// The environment variable of `name`, one of [`Setting::names`].
    fn variable_of(&self, name: &str) -> Option<String> {
        matches!(self.giver, SetBy::Operator | SetBy::Environment)
            .then(|| format!("KVFERRY_{}", name.to_ascii_uppercase()))
    }

    /// The environment variables that set the key: its own, then that of its earlier name.
    pub fn variables(&self) -> impl Iterator<Item = String> {
        self.names().filter_map(|name| self.variable_of(name))
    }

    /// The key, then its earlier name.
    fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        std::iter::once(self.key).chain(self.former)
    }
}

/// The keys of `part`.
pub fn of(part: Component) -> impl Iterator<Item = &'static Setting> {
    TABLE.iter().filter(move |setting| setting.parts.contains(&part))
}
