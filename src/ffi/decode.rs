//! Cold input and output as msgpack maps: configuration, geometry, params, stats.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::MAX_DEPTH;

/// The largest map accepted. The largest that occurs is a geometry: some hundred bytes per layer.
const MAX_BYTES: usize = 64 << 20;

/// Encodes a map for the caller.
pub(super) fn encode<T: Serialize>(what: &str, value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|e| Error::new(ErrorKind::Internal, format!("encoding {what}: {e}")))
}

/// Decodes the msgpack map `what`. An error names the key by its path, such as `groups[1].block_size`.
pub(super) fn map<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T> {
    if bytes.len() > MAX_BYTES {
        return Err(Error::invalid(format!("{what} has {} bytes, the most is {MAX_BYTES}", bytes.len())));
    }
    let error = match direct(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    // The msgpack decoder names the marker that it found ("FixStr(4)") and not what was expected. A second look
    // through a self-describing value says both in words; maps that hold binary cannot take it.
    let explained = direct::<serde_json::Value>(bytes).ok().and_then(|value| {
        serde_path_to_error::deserialize::<_, T>(value)
            .err()
            .map(|e| (e.path().to_string(), e.into_inner().to_string()))
    });
    let (path, text) = explained.unwrap_or_else(|| (error.path().to_string(), error.into_inner().to_string()));
    // The path of an error at the map itself is a single dot.
    let place = if path == "." { String::new() } else { format!("key {path:?}: ") };
    Err(Error::invalid(format!("{what}: {place}{text}")))
}

fn direct<T: DeserializeOwned>(
    bytes: &[u8],
) -> std::result::Result<T, serde_path_to_error::Error<rmp_serde::decode::Error>> {
    let mut decoder = rmp_serde::Deserializer::from_read_ref(bytes);
    decoder.set_max_depth(MAX_DEPTH);
    serde_path_to_error::deserialize(&mut decoder)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Config {
        name: String,
        #[serde(default)]
        groups: Vec<Group>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Group {
        block_size: u32,
    }

    fn message<T: Serialize>(value: &T) -> String {
        map::<Config>("config", &rmp_serde::to_vec_named(value).unwrap()).unwrap_err().message().to_owned()
    }

    #[derive(Serialize, Default)]
    struct Bad<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        nmae: Option<&'a str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        groups: Vec<BadGroup<'a>>,
    }

    #[derive(Serialize)]
    struct BadGroup<'a> {
        block_size: &'a str,
    }

    #[test]
    fn errors_name_the_key_and_what_was_expected() {
        let unknown = message(&Bad { nmae: Some("x"), ..Bad::default() });
        assert!(unknown.contains("unknown field `nmae`, expected `name` or `groups`"), "{unknown}");
        let missing = message(&Bad::default());
        assert!(missing.contains("missing field `name`"), "{missing}");
        let group = BadGroup { block_size: "many" };
        let wrong = message(&Bad { name: Some("n"), groups: vec![group], ..Bad::default() });
        assert!(wrong.contains("\"groups[0].block_size\"") && wrong.contains("expected u32"), "{wrong}");
    }

    #[test]
    fn damaged_and_foreign_bytes_are_errors() {
        for bytes in [&b""[..], &[0x81][..], b"{\"name\": 1}", &[0xc1][..], &[0x91; 4096][..]] {
            assert!(map::<Config>("config", bytes).is_err(), "{bytes:x?}");
        }
    }
}
