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
pub use describe::{Described, Description, Unknown, describe, describe_all};
pub use parse::{defaults, parse_config};
pub use table::{DEVELOPMENT, TABLE};
pub use units::{micros, millis};

/// The fields of a worker's configuration that are configurations themselves, and take their keys of the same map.
const HELD: [&str; 2] = ["agent", "machine"];

/// What is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
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
    /// vLLM's connector, which looks at these keys itself.
    Connector,
}

impl Part {
    /// The name in errors and descriptions.
    pub fn name(self) -> &'static str {
        match self {
            Part::Agent => "agent",
            Part::Worker => "worker",
            Part::Scheduler => "scheduler",
            Part::Listener => "listener",
            Part::Aggregator => "aggregator",
            Part::Connector => "connector",
        }
    }
}

/// Which values a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
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

/// What holds where neither a caller nor the environment says anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
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

/// Who sets a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Giver {
    /// Whoever runs the engine: in vLLM's `kv_connector_extra_config`, by the environment variable, or through the
    /// program.
    Operator,
    /// As [`Giver::Operator`], but there is no variable.
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
    pub parts: &'static [Part],
    /// Who sets it.
    pub giver: Giver,
    /// Which values it takes.
    pub kind: Kind,
    /// Of numbers; empty for a bare number.
    pub unit: &'static str,
    /// What holds otherwise.
    pub default: Default,
    /// What it means: sentences.
    pub help: &'static str,
    /// Whether the variable is read where the value is used, and not when a configuration is parsed.
    pub read_late: bool,
    /// True for a key that has no effect and is accepted with a warning.
    pub is_retired: bool,
}

impl Setting {
    /// The environment variable that sets the key, if one does.
    pub fn variable(&self) -> Option<String> {
        matches!(self.giver, Giver::Operator | Giver::Environment)
            .then(|| format!("KVFERRY_{}", self.key.to_ascii_uppercase()))
    }
}

/// The keys of `part`.
pub fn of(part: Part) -> impl Iterator<Item = &'static Setting> {
    TABLE.iter().filter(move |setting| setting.parts.contains(&part))
}
