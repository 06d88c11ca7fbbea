//! Reads the configuration types from a tree of values, whether it came from JSON or from `key=value` lists.
//!
//! Both give a [`Value`]; the difference is that on the command line every leaf is a text. So texts are accepted where a
//! number, a switch or a list is wanted, and every error carries the path of keys down to the value.

use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};
use serde_json::{Map, Value};

use super::error::{Error, Problem};

/// Reads a `T` out of `value`.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, Error> {
    T::deserialize(Node { value, depth: 0 })
}

/// Parses JSON, refusing keys that occur twice.
pub fn parse_json(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str::<Strict>(text).map(|strict| strict.0)
}

struct Node {
    value: Value,
    /// How many lists this value is in: texts are cut at `:` outside, at `+` inside.
    depth: u8,
}

impl Node {
    /// Runs `read` on a copy of the visitor's input and tells which value was refused.
    fn leaf<T>(self, read: impl FnOnce(Value) -> Result<T, Error>) -> Result<T, Error> {
        let shown = self.value.clone();
        read(self.value).map_err(|error| error.refusing(&shown))
    }
}

macro_rules! integers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.leaf(|value| visit_integer(value, visitor))
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Node {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let depth = self.depth;
        self.leaf(|value| match value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(on) => visitor.visit_bool(on),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(number) => visitor.visit_f64(number),
                None => visit_integer(number.into(), visitor),
            },
            Value::String(text) => visitor.visit_string(text),
            Value::Array(items) => visitor.visit_seq(Items::new(items, depth)),
            Value::Object(map) => visitor.visit_map(Entries::new(map)),
        })
    }

    integers!(deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
              deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64);

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.leaf(|value| match value {
            Value::Bool(on) => visitor.visit_bool(on),
            Value::String(text) => match text.as_str() {
                "on" | "true" | "yes" => visitor.visit_bool(true),
                "off" | "false" | "no" => visitor.visit_bool(false),
                _ => Err(Error::of(Problem::Expected("on or off".to_owned()))),
            },
            _ => Err(Error::of(Problem::Expected("on or off".to_owned()))),
        })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let depth = self.depth;
        self.leaf(|value| match value {
            Value::Array(items) => visitor.visit_seq(Items::new(items, depth)),
            Value::String(text) => {
                let separator = if depth == 0 { ':' } else { '+' };
                let items = text
                    .split(separator)
                    .map(|item| Value::String(item.to_owned()));
                visitor.visit_seq(Items::new(items.collect(), depth))
            }
            _ => Err(Error::of(Problem::Expected("a list".to_owned()))),
        })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.leaf(|value| match value {
            Value::String(text) => visitor.visit_enum(text.into_deserializer()),
            _ => Err(Error::of(Problem::UnknownChoice {
                given: String::new(),
                expected: variants,
            })),
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.leaf(|value| match value {
            Value::Object(map) => visitor.visit_map(Entries::new(map)),
            _ => Err(Error::of(Problem::Expected(
                "an object of keys and values".to_owned(),
            ))),
        })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple tuple_struct map identifier ignored_any
    }
}

fn visit_integer<'de, V: Visitor<'de>>(value: Value, visitor: V) -> Result<V::Value, Error> {
    let text = match &value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => return Err(Error::of(Problem::Expected("a whole number".to_owned()))),
    };
    match (text.parse::<u64>(), text.parse::<i64>()) {
        (Ok(number), _) if !text.starts_with('+') => visitor.visit_u64(number),
        (Err(_), Ok(number)) => visitor.visit_i64(number),
        _ => Err(Error::of(Problem::Expected("a whole number".to_owned()))),
    }
}

struct Items {
    items: std::vec::IntoIter<Value>,
    depth: u8,
    index: usize,
}

impl Items {
    fn new(items: Vec<Value>, depth: u8) -> Self {
        Self {
            items: items.into_iter(),
            depth: depth + 1,
            index: 0,
        }
    }
}

impl<'de> de::SeqAccess<'de> for Items {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        let Some(value) = self.items.next() else {
            return Ok(None);
        };
        let index = self.index;
        self.index += 1;
        let depth = self.depth;
        seed.deserialize(Node { value, depth })
            .map(Some)
            .map_err(|error| error.under_index(index))
    }
}

struct Entries {
    entries: serde_json::map::IntoIter,
    current: Option<(String, Value)>,
}

impl Entries {
    fn new(map: Map<String, Value>) -> Self {
        Self {
            entries: map.into_iter(),
            current: None,
        }
    }
}

impl<'de> de::MapAccess<'de> for Entries {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        self.current = self.entries.next();
        match &self.current {
            Some((key, _)) => seed.deserialize(key.as_str().into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Error> {
        let Some((key, value)) = self.current.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        seed.deserialize(Node { value, depth: 0 })
            .map_err(|error| error.under_key(&key))
    }
}

/// A JSON value whose objects have no key twice.
struct Strict(Value);

impl<'de> de::Deserialize<'de> for Strict {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StrictVisitor;
        impl<'de> Visitor<'de> for StrictVisitor {
            type Value = Value;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, on: bool) -> Result<Value, E> {
                Ok(on.into())
            }
            fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
                Ok(number.into())
            }
            fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
                Ok(number.into())
            }
            fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
                Ok(number.into())
            }
            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(text.into())
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(Strict(item)) = seq.next_element()? {
                    items.push(item);
                }
                Ok(items.into())
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
                let mut map = Map::new();
                while let Some((key, Strict(value))) = entries.next_entry::<String, _>()? {
                    if map.contains_key(&key) {
                        let message = format!("key {key:?} is given twice; keep one");
                        return Err(de::Error::custom(message));
                    }
                    map.insert(key, value);
                }
                Ok(map.into())
            }
        }
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}
