//! The types of commands and events, as `query-qmp-schema` describes them.
//!
//! They are taken from the Rust types that are read from and written to the wire, by way of their JSON schemas, so that
//! there is one source for what is documented, what is accepted and what is sent. Type names mean nothing to clients.

use std::collections::BTreeMap;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::error::Error;

/// A member of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Member {
    name: String,
    type_name: String,
    optional: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Type {
    /// One of JSON's own: its name in the introspection's `json-type`, and in errors.
    Builtin(&'static str, &'static str),
    Array(String),
    Enum(Vec<String>),
    Object(Vec<Member>),
}

const BUILTINS: [(&str, Type); 6] = [
    ("str", Type::Builtin("string", "string")),
    ("int", Type::Builtin("int", "integer")),
    ("number", Type::Builtin("number", "number")),
    ("bool", Type::Builtin("boolean", "boolean")),
    ("null", Type::Builtin("null", "null")),
    ("any", Type::Builtin("value", "value")),
];

/// Which way values of a type go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From clients: members with defaults may be left out.
    In,
    /// To clients.
    Out,
}

/// All types in use, by name.
#[derive(Debug)]
pub struct Types(BTreeMap<String, Type>);

impl Default for Types {
    fn default() -> Self {
        let builtins = BUILTINS.map(|(name, builtin)| (name.to_owned(), builtin));
        Self(builtins.into())
    }
}

impl Types {
    /// Takes up `T` and the types that it is made of; returns its name.
    pub fn add<T: JsonSchema>(&mut self, direction: Direction) -> String {
        let settings = SchemaSettings::draft2020_12();
        let settings = match direction {
            Direction::In => settings.for_deserialize(),
            Direction::Out => settings.for_serialize(),
        };
        let schema = SchemaGenerator::new(settings).into_root_schema_for::<T>();
        let schema = schema.as_value();
        let empty = Map::new();
        let definitions = schema.get("$defs").and_then(Value::as_object);
        self.convert(schema, None, definitions.unwrap_or(&empty))
    }

    /// The type of `schema`, which is called `name` if it is not named within.
    fn convert(&mut self, schema: &Value, name: Option<&str>, all: &Map<String, Value>) -> String {
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        if let Some(reference) = text("$ref") {
            let name = reference.rsplit('/').next().unwrap_or_default();
            return match all.get(name) {
                Some(definition) => self.convert(definition, Some(name), all),
                None => "any".to_owned(),
            };
        }
        // An optional member of a named type: that type, or null.
        if let Some(choices) = schema.get("anyOf").and_then(Value::as_array) {
            let chosen = choices.iter().find(|choice| choice["type"] != "null");
            return chosen.map_or("null".to_owned(), |chosen| self.convert(chosen, name, all));
        }
        let name = name.or_else(|| text("title"));
        let words = words(schema);
        if !words.is_empty() {
            return self.insert(name, Type::Enum(words));
        }
        let json_type = match &schema["type"] {
            Value::String(one) => one.as_str(),
            // An optional member of a JSON type: that type, or null.
            Value::Array(some) => {
                let mut names = some.iter().filter_map(Value::as_str);
                names.find(|name| *name != "null").unwrap_or("null")
            }
            _ => "any",
        };
        match json_type {
            "string" => "str".to_owned(),
            "integer" => "int".to_owned(),
            "number" => "number".to_owned(),
            "boolean" => "bool".to_owned(),
            "null" => "null".to_owned(),
            "array" => {
                let item = self.convert(&schema["items"], None, all);
                let name = format!("[{item}]");
                self.insert(Some(&name), Type::Array(item))
            }
            "object" => {
                let members = self.members(schema, all);
                self.insert(name, Type::Object(members))
            }
            _ => "any".to_owned(),
        }
    }

    fn members(&mut self, schema: &Value, all: &Map<String, Value>) -> Vec<Member> {
        let required = schema["required"].as_array();
        let is_required = |name: &str| required.is_some_and(|list| list.iter().any(|r| r == name));
        let properties = schema["properties"].as_object();
        properties
            .into_iter()
            .flatten()
            .map(|(name, property)| Member {
                name: name.clone(),
                type_name: self.convert(property, None, all),
                optional: !is_required(name),
            })
            .collect()
    }

    fn insert(&mut self, name: Option<&str>, definition: Type) -> String {
        let name = name.unwrap_or("unnamed").to_owned();
        let former = self.0.insert(name.clone(), definition.clone());
        debug_assert!(
            former.is_none_or(|former| former == definition),
            "two types are called {name}"
        );
        name
    }

    /// Checks a command's arguments against the object type `type_name`.
    pub fn check_arguments(
        &self,
        type_name: &str,
        arguments: &Map<String, Value>,
    ) -> Result<(), Error> {
        let Some(Type::Object(members)) = self.0.get(type_name) else {
            return Ok(());
        };
        for member in members {
            match arguments.get(&member.name) {
                None | Some(Value::Null) if member.optional => {}
                None => return Err(Error::MissingArgument(member.name.clone())),
                Some(value) => self.check(&member.type_name, &member.name, value)?,
            }
        }
        let known = |name: &String| members.iter().any(|member| &member.name == name);
        match arguments.keys().find(|name| !known(name)) {
            Some(name) => Err(Error::UnexpectedArgument(name.clone())),
            None => Ok(()),
        }
    }

    fn check(&self, type_name: &str, name: &str, value: &Value) -> Result<(), Error> {
        let wrong = |expected| {
            let name = name.to_owned();
            Err(Error::ArgumentType { name, expected })
        };
        match (self.0.get(type_name), value) {
            (Some(Type::Builtin(json_type, expected)), _) => {
                let right = match *json_type {
                    "string" => value.is_string(),
                    "int" => value.is_i64() || value.is_u64(),
                    "number" => value.is_number(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    _ => true,
                };
                if right { Ok(()) } else { wrong(expected) }
            }
            (Some(Type::Array(item)), Value::Array(values)) => values
                .iter()
                .try_for_each(|value| self.check(item, name, value)),
            (Some(Type::Array(_)), _) => wrong("array"),
            (Some(Type::Enum(words)), Value::String(word)) if words.contains(word) => Ok(()),
            (Some(Type::Enum(_)), Value::String(word)) => Err(Error::ArgumentValue {
                name: name.to_owned(),
                value: word.clone(),
            }),
            (Some(Type::Enum(_)), _) => wrong("string"),
            (Some(Type::Object(_)), Value::Object(members)) => {
                self.check_arguments(type_name, members)
            }
            (Some(Type::Object(_)), _) => wrong("object"),
            (None, _) => Ok(()),
        }
    }

    /// Whether `value` is of type `type_name`: what clients are sent must be what they were told.
    pub fn conforms(&self, type_name: &str, value: &Value) -> Result<(), Error> {
        self.check(type_name, "return", value)
    }

    /// The description of all types.
    pub fn describe(&self) -> Vec<Value> {
        self.0
            .iter()
            .map(|(name, definition)| match definition {
                Type::Builtin(json_type, _) => {
                    json!({"name": name, "meta-type": "builtin", "json-type": json_type})
                }
                Type::Array(item) => {
                    json!({"name": name, "meta-type": "array", "element-type": item})
                }
                Type::Enum(words) => {
                    let members: Vec<Value> =
                        words.iter().map(|word| json!({"name": word})).collect();
                    json!({"name": name, "meta-type": "enum", "members": members, "values": words})
                }
                Type::Object(members) => {
                    let members: Vec<Value> = members.iter().map(describe_member).collect();
                    json!({"name": name, "meta-type": "object", "members": members})
                }
            })
            .collect()
    }
}

fn describe_member(member: &Member) -> Value {
    let mut description = json!({"name": member.name, "type": member.type_name});
    if member.optional {
        description["default"] = Value::Null;
    }
    description
}

/// The words of an enumeration; none if `schema` is none.
fn words(schema: &Value) -> Vec<String> {
    let list = |schema: &Value, key: &str| {
        let list = schema.get(key).and_then(Value::as_array);
        list.cloned().unwrap_or_default()
    };
    let mut words = list(schema, "enum");
    // Words with a documentation of their own are a choice each.
    for choice in list(schema, "oneOf") {
        words.extend(list(&choice, "enum"));
        words.extend(choice.get("const").cloned());
    }
    let words = words.iter().filter_map(Value::as_str);
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "kebab-case")]
    #[allow(dead_code)]
    enum Colour {
        /// Documented, which makes for another schema.
        DarkRed,
        Blue,
        Green,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "kebab-case")]
    #[allow(dead_code)]
    struct Point {
        x_max: i64,
        #[serde(skip_serializing_if = "Option::is_none")]
        label: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        colour: Option<Colour>,
        #[serde(default)]
        inner: Vec<Inner>,
        anything: Value,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Inner {
        on: bool,
        ratio: f64,
    }

    fn types() -> (Types, String) {
        let mut types = Types::default();
        let name = types.add::<Point>(Direction::In);
        (types, name)
    }

    #[test]
    fn types_are_described_as_qemus_clients_expect() {
        let (types, name) = types();
        let all = types.describe();
        let find = |name: &str| all.iter().find(|entry| entry["name"] == name).unwrap();
        assert_eq!(
            find(&name),
            &json!({"name": "Point", "meta-type": "object", "members": [
                {"name": "x-max", "type": "int"},
                {"name": "label", "type": "str", "default": null},
                {"name": "colour", "type": "Colour", "default": null},
                {"name": "inner", "type": "[Inner]", "default": null},
                {"name": "anything", "type": "any"},
            ]})
        );
        assert_eq!(
            find("[Inner]"),
            &json!({"name": "[Inner]", "meta-type": "array", "element-type": "Inner"})
        );
        assert_eq!(
            find("Colour")["values"],
            json!(["blue", "green", "dark-red"])
        );
        assert_eq!(find("number")["json-type"], "number");
    }

    #[test]
    fn an_always_sent_member_is_not_optional() {
        let mut types = Types::default();
        types.add::<Vec<Point>>(Direction::Out);
        let Some(Type::Object(members)) = types.0.get("Point") else {
            panic!("no Point")
        };
        let optional = members.iter().filter(|member| member.optional);
        let optional: Vec<&str> = optional.map(|member| member.name.as_str()).collect();
        assert_eq!(optional, ["label", "colour"]);
    }

    #[test]
    fn arguments_are_refused_in_qemus_words() {
        let (types, name) = types();
        let check = |value: Value| {
            let arguments = value.as_object().unwrap();
            types.check_arguments(&name, arguments)
        };
        let good = json!({"x-max": 1, "anything": [], "label": "a", "colour": "blue",
                          "inner": [{"on": true, "ratio": 1}]});
        assert_eq!(check(good.clone()), Ok(()));
        let with = |key: &str, value: Value| {
            let mut changed = good.clone();
            changed[key] = value;
            check(changed).unwrap_err().to_string()
        };
        for (key, value, problem) in [
            ("y", json!(1), "Parameter 'y' is unexpected"),
            (
                "x-max",
                json!(1.5),
                "Invalid parameter type for 'x-max', expected: integer",
            ),
            (
                "x-max",
                Value::Null,
                "Invalid parameter type for 'x-max', expected: integer",
            ),
            (
                "label",
                json!(1),
                "Invalid parameter type for 'label', expected: string",
            ),
            (
                "colour",
                json!("red"),
                "Parameter 'colour' does not accept value 'red'",
            ),
            (
                "inner",
                json!({}),
                "Invalid parameter type for 'inner', expected: array",
            ),
            (
                "inner",
                json!([1]),
                "Invalid parameter type for 'inner', expected: object",
            ),
            (
                "inner",
                json!([{"on": true}]),
                "Parameter 'ratio' is missing",
            ),
        ] {
            assert_eq!(with(key, value), problem);
        }
        assert_eq!(
            check(json!({"x-max": 1})).unwrap_err().to_string(),
            "Parameter 'anything' is missing"
        );
        assert_eq!(
            check(json!({"x-max": 1, "anything": 1, "label": null})),
            Ok(())
        );
    }
}
