//! The wire format of areas: columns, each a single value where all areas have the same.
//!
//! Only the names of the layers are always a list, which tells how many areas there are. The layers of a rank differ in
//! their names and offsets and in little else. With 64 layers, columns take a ninth of the bytes of a map per area, and
//! a consumer that connects to an engine of 64 ranks reads as many of these at once.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Area, MAX_AREAS, MAX_PART_BYTES};

/// One field of all areas.
enum Column<T> {
    Same(T),
    Each(std::vec::IntoIter<T>),
}

impl<T: Clone> Column<T> {
    /// The number of areas, where the column tells.
    fn len(&self) -> Option<usize> {
        match self {
            Column::Same(_) => None,
            Column::Each(values) => Some(values.len()),
        }
    }

    /// The next area's value; none behind the last one.
    fn next(&mut self) -> Option<T> {
        match self {
            Column::Same(value) => Some(value.clone()),
            Column::Each(values) => values.next(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Column<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Values<T> {
            type Value = Column<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value for all areas, or a list of one for each")
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(Column::Same)
            }

            fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(Column::Same)
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
                T::deserialize(value.into_deserializer()).map(Column::Same)
            }

            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Self::Value, E> {
                // It becomes as many as there are areas, so its length is not left to the check of the whole.
                if value.len() > MAX_PART_BYTES {
                    let text = format!("a name of {} bytes for all areas, at most {MAX_PART_BYTES}", value.len());
                    return Err(E::custom(text));
                }
                T::deserialize(value.into_deserializer()).map(Column::Same)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::with_capacity(list.size_hint().unwrap_or(0).min(MAX_AREAS));
                while let Some(value) = list.next_element()? {
                    // A byte here becomes an area of some hundred.
                    if values.len() >= MAX_AREAS {
                        return Err(A::Error::custom(format!("more than {MAX_AREAS} areas, the most that can be")));
                    }
                    values.push(value);
                }
                Ok(Column::Each(values.into_iter()))
            }
        }

        deserializer.deserialize_any(Values(PhantomData))
    }
}

/// The fields of [`Area`], named once: those that must be there, and those that need not with the value of their absence.
macro_rules! columns {
    (needed: $($needed:ident),+; optional: $($optional:ident = $absent:expr),+) => {
        const COLUMNS: usize = [$(stringify!($needed)),+].len() + [$(stringify!($optional)),+].len();

        fn write<S: Serializer>(areas: &[Area], serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(Some(COLUMNS))?;
            $(entry(&mut map, stringify!($needed), areas, |area| &area.$needed)?;)+
            $(entry(&mut map, stringify!($optional), areas, |area| &area.$optional)?;)+
            map.end()
        }

        fn read<'de, A: MapAccess<'de>>(mut map: A) -> Result<Vec<Area>, A::Error> {
            $(let mut $needed: Option<Column<_>> = None;)+
            $(let mut $optional: Option<Column<_>> = None;)+
            while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
                match &*key {
                    $(stringify!($needed) => $needed = Some(map.next_value()?),)+
                    $(stringify!($optional) => $optional = Some(map.next_value()?),)+
                    _ => drop(map.next_value::<IgnoredAny>()?),
                }
            }
            $(let mut $needed = $needed.ok_or_else(|| A::Error::missing_field(stringify!($needed)))?;)+
            $(let mut $optional = $optional.unwrap_or(Column::Same($absent));)+
            let lens = [$((stringify!($needed), $needed.len())),+, $((stringify!($optional), $optional.len())),+];
            let mut areas = Vec::with_capacity(rows(&lens)?);
            for _ in 0..areas.capacity() {
                let short = || A::Error::custom("a column that ends early");
                areas.push(Area {
                    $($needed: $needed.next().ok_or_else(short)?,)+
                    $($optional: $optional.next().ok_or_else(short)?,)+
                });
            }
            Ok(areas)
        }
    };
}

columns! {
    needed: layer, part, group, region, offset, num_blocks, block_stride, heads, first_head, total_heads, head_stride,
        tokens, token_stride, content;
    optional: pages = 1, page_stride = 0, units = 1, unit_stride = 0, heads_by_rank = false, format = String::new()
}

fn entry<M: SerializeMap, T: Serialize + PartialEq>(
    map: &mut M,
    name: &'static str,
    areas: &[Area],
    field: impl Fn(&Area) -> &T,
) -> Result<(), M::Error> {
    let mut values = areas.iter().map(&field);
    match values.next() {
        Some(first) if name != "layer" && values.all(|value| value == first) => map.serialize_entry(name, first),
        _ => map.serialize_entry(name, &areas.iter().map(field).collect::<Vec<_>>()),
    }
}

/// The number of areas: what the first column says, and all others that say it.
fn rows<E: serde::de::Error>(lens: &[(&str, Option<usize>)]) -> Result<usize, E> {
    let rows = lens.first().and_then(|(_, len)| *len);
    let rows = rows.ok_or_else(|| E::custom("one layer for all areas; expected a list of one for each"))?;
    match lens.iter().find(|(_, len)| len.is_some_and(|len| len != rows)) {
        None => Ok(rows),
        Some((other, len)) => Err(E::custom(format!("{rows} areas in layer, {} in {other}", len.unwrap_or(0)))),
    }
}

pub(super) fn serialize<S: Serializer>(areas: &[Area], serializer: S) -> Result<S::Ok, S::Error> {
    write(areas, serializer)
}

/// Columns, or a list of areas, as a host gives them.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Area>, D::Error> {
    struct Areas;

    impl<'de> Visitor<'de> for Areas {
        type Value = Vec<Area>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of areas, or a map of their columns")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut areas = Vec::new();
            while let Some(area) = list.next_element()? {
                areas.push(area);
            }
            Ok(areas)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            read(map)
        }
    }

    deserializer.deserialize_any(Areas)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::super::Geometry;
    use super::*;

    fn area(layer: &str, offset: u64) -> Area {
        Area { layer: layer.into(), part: "kv".into(), offset, ..Area::default() }
    }

    fn decoded(areas: Value) -> Result<Vec<Area>, String> {
        // By way of msgpack, as on the wire.
        let bytes = rmp_serde::to_vec_named(&json!({"groups": [], "areas": areas})).unwrap();
        rmp_serde::from_slice::<Geometry>(&bytes).map(|geometry| geometry.areas).map_err(|e| e.to_string())
    }

    fn columns() -> Value {
        json!({
            "layer": ["a", "b"], "part": "kv", "group": 0, "region": 0, "offset": [0, 8], "num_blocks": 1,
            "block_stride": 1, "heads": 1, "first_head": 0, "total_heads": 1, "head_stride": 1, "tokens": 1,
            "token_stride": 1, "content": 1,
        })
    }

    #[test]
    fn any_areas_come_back_and_what_is_equal_travels_once() {
        let different = Area {
            units: 3,
            unit_stride: u64::MAX,
            pages: 7,
            content: 5,
            heads_by_rank: true,
            format: "bfloat16".into(),
            ..area("c", 1)
        };
        for areas in [
            vec![],
            vec![area("a", 3)],
            vec![area("a", 0), area("b", 8)],
            vec![area("a", 0), area("a", 0)],
            vec![area("a", 0), different],
        ] {
            let geometry = Geometry { groups: Vec::new(), areas };
            let bytes = rmp_serde::to_vec_named(&geometry).unwrap();
            assert_eq!(rmp_serde::from_slice::<Geometry>(&bytes).unwrap(), geometry);
        }
        let geometry =
            Geometry { groups: Vec::new(), areas: (0..64).map(|i| area(&format!("l{i}"), i << 30)).collect() };
        let value = serde_json::to_value(&geometry).unwrap();
        let lists: Vec<&String> = value
            .get("areas")
            .unwrap()
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, v)| v.is_array())
            .map(|(k, _)| k)
            .collect();
        assert_eq!(lists, ["layer", "offset"]);
    }

    #[test]
    fn a_list_of_maps_is_read_too() {
        let maps = json!([serde_json::to_value(area("a", 0)).unwrap(), serde_json::to_value(area("b", 8)).unwrap()]);
        assert_eq!(decoded(maps).unwrap(), [area("a", 0), area("b", 8)]);
        assert_eq!(decoded(columns()).unwrap(), [area("a", 0), area("b", 8)]);
    }

    #[test]
    fn columns_that_do_not_fit_are_refused() {
        let with = |key: &str, value: Value| {
            let mut all = columns();
            all.as_object_mut().unwrap().insert(key.into(), value);
            decoded(all)
        };
        assert!(with("a later release's", json!({"x": [1]})).is_ok());
        assert_eq!(with("units", json!([2, 3])).unwrap().iter().map(|a| a.units).collect::<Vec<_>>(), [2, 3]);
        for (key, value, words) in [
            ("heads", json!([1, 1, 1]), "2 areas in layer, 3 in heads"),
            ("layer", json!([]), "0 areas in layer, 2 in offset"),
            ("heads", json!(-1), "-1"),
            ("heads", json!(1u64 << 32), "4294967296"),
            ("heads", json!("two"), "two"),
            ("layer", json!(5), "5"),
            ("layer", json!("a"), "one layer for all areas"),
            ("part", json!({}), "a value for all areas"),
            ("part", json!("p".repeat(MAX_PART_BYTES + 1)), "a name of 65 bytes for all areas, at most 64"),
            ("format", json!("f".repeat(MAX_PART_BYTES + 1)), "a name of 65 bytes for all areas, at most 64"),
            ("heads_by_rank", json!(1), "expected a boolean"),
            ("units", json!(vec![1; MAX_AREAS + 1]), "more than 16384 areas"),
        ] {
            let error = with(key, value).unwrap_err();
            assert!(error.contains(words), "{key}: {error}");
        }
        let mut missing = columns();
        missing.as_object_mut().unwrap().remove("content");
        assert!(decoded(missing).unwrap_err().contains("missing field `content`"));
        assert!(decoded(json!(3)).is_err());
    }
}
