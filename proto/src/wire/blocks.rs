//! Block ids as a flat integer array, on the wire as little-endian 32-bit words in one binary field.

use std::fmt;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::limits::MAX_BLOCK_IDS;

/// Block ids of one KV-cache group, cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks(std::sync::Arc<[u32]>);

impl Blocks {
    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    /// The ids, for changes here and in no clone. They are copied first if there are clones.
    pub fn make_mut(&mut self) -> &mut [u32] {
        std::sync::Arc::make_mut(&mut self.0)
    }

    /// How many ids.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Tells whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<u32>> for Blocks {
    fn from(ids: Vec<u32>) -> Self {
        Blocks(ids.into())
    }
}

impl From<&[u32]> for Blocks {
    fn from(ids: &[u32]) -> Self {
        Blocks(ids.into())
    }
}

impl Serialize for Blocks {
    /// Errors: more than [`MAX_BLOCK_IDS`] ids.
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if self.0.len() > MAX_BLOCK_IDS {
            return Err(serde::ser::Error::custom(too_many(self.0.len())));
        }
        s.serialize_bytes(&self.0.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
    }
}

fn too_many(ids: usize) -> String {
    format!("a block list of {ids} ids is over the limit of {MAX_BLOCK_IDS}")
}

impl<'de> Deserialize<'de> for Blocks {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Ids;

        impl Visitor<'_> for Ids {
            type Value = Blocks;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("block ids as little-endian 32-bit words in one binary field")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Blocks, E> {
                let (words, rest) = bytes.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(E::custom(format!(
                        "a block list is a multiple of 4 bytes, this one has {}",
                        bytes.len()
                    )));
                }
                if words.len() > MAX_BLOCK_IDS {
                    return Err(E::custom(too_many(words.len())));
                }
                Ok(Blocks(words.iter().map(|w| u32::from_le_bytes(*w)).collect()))
            }
        }

        d.deserialize_bytes(Ids)
    }
}
