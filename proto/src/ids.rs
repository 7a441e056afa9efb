//! The names of things: engines, ranks, requests, and the incarnations that tell a restarted one from its predecessor.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result};

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $max:expr, $what:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(std::sync::Arc<str>);

        impl $name {
            /// The longest id accepted, in bytes.
            pub const MAX_BYTES: usize = $max;

            /// Checks that `text` is not empty and not over [`Self::MAX_BYTES`].
            pub fn new(text: impl AsRef<str>) -> Result<Self> {
                let text = text.as_ref();
                if text.is_empty() || text.len() > $max {
                    return Err(Error::invalid(format!(
                        "{} must have 1 to {} bytes, this one has {}", $what, $max, text.len()
                    )));
                }
                Ok($name(text.into()))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
                Self::new(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

text_id!(
    /// An engine (one vLLM instance with all of its ranks), as the host names it. vLLM: `kv_transfer_config.engine_id`.
    EngineId, 256, "an engine id"
);
text_id!(
    /// A request, as the engine that runs it names it. Prefill and decode engines name the same request differently.
    RequestId, 512, "a request id"
);

/// Tells one life of an engine or agent from the next. Drawn at random at each start, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A worker's place in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RankId {
    /// Pipeline-parallel rank, from 0.
    pub pp: u32,
    /// Tensor-parallel rank, from 0.
    pub tp: u32,
}

impl fmt::Display for RankId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "(pp {}, tp {})", self.pp, self.tp)
    }
}
