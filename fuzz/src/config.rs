//! Configurations and other maps that a host gives through the C ABI.

use kvferry::fuzzing;

/// The first byte chooses the kind of map, the others are the map.
pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else { return };
    fuzzing::config(which, bytes);
}
