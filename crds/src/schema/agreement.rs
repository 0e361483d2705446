//! Schema and types say the same: every field that this version honours survives the way through the type, and the type
//! has no field that the schema does not know.

use serde_json::{Map, Value, json};

use super::policy::ROUTE_POLICY;
use super::pool::POOL;
use super::status::{POLICY_STATUS, POOL_STATUS};
use super::{Field, Form, Preset, Shape, Support};
use crate::{PoolSpec, PoolStatus, RoutePolicySpec, RoutePolicyStatus};

/// An object with every honoured field, each of the lowest value (`last`: the last choice) that the schema allows.
fn full(fields: &[Field], last: bool) -> Value {
    let mut object = Map::new();
    for field in fields
        .iter()
        .filter(|field| field.support != Support::Later)
    {
        if let Some(value) = sample(&field.shape, last) {
            object.insert(field.name.to_owned(), value);
        }
    }
    Value::Object(object)
}

fn sample(shape: &Shape, last: bool) -> Option<Value> {
    Some(match shape {
        Shape::Text {
            form: Form::AbsolutePath,
            ..
        } => json!("/a"),
        Shape::Text { .. } => json!("a"),
        Shape::Integer { least, most } => json!(if last { *most } else { *least }),
        Shape::Bool => json!(true),
        Shape::Choice { now, .. } => json!(if last { now.last()? } else { now.first()? }),
        Shape::Object(fields) => full(fields, last),
        Shape::List { of, .. } => json!([sample(of, last)?]),
        Shape::Map { of, .. } => json!({"key": sample(of, last)?}),
        Shape::Quantity => json!("1Gi"),
        Shape::Foreign => return None,
    })
}

#[test]
fn every_field_of_the_schema_is_held_by_its_type() {
    for last in [false, true] {
        let written = full(POOL, last);
        let spec: PoolSpec = serde_json::from_value(written.clone()).unwrap();
        similar(&written, &serde_json::to_value(spec).unwrap(), "spec");

        let written = full(ROUTE_POLICY, last);
        let spec: RoutePolicySpec = serde_json::from_value(written.clone()).unwrap();
        similar(&written, &serde_json::to_value(spec).unwrap(), "spec");

        let written = full(POOL_STATUS, last);
        let status: PoolStatus = serde_json::from_value(written.clone()).unwrap();
        similar(&written, &serde_json::to_value(status).unwrap(), "status");

        let written = full(POLICY_STATUS, last);
        let status: RoutePolicyStatus = serde_json::from_value(written.clone()).unwrap();
        similar(&written, &serde_json::to_value(status).unwrap(), "status");
    }
}

fn similar(written: &Value, held: &Value, path: &str) {
    match (written, held) {
        (Value::Object(written), Value::Object(held)) => {
            for (name, value) in written {
                let path = format!("{path}.{name}");
                let other = held
                    .get(name)
                    .unwrap_or_else(|| panic!("the type drops {path}"));
                similar(value, other, &path);
            }
            for name in held.keys() {
                assert!(
                    written.contains_key(name),
                    "the schema does not know {path}.{name}"
                );
            }
        }
        (written, held) => assert_eq!(written, held, "{path}"),
    }
}

/// The defaults of the schema, where an object with nothing in it has the field at all.
fn defaults(fields: &[Field]) -> Value {
    let mut object = Map::new();
    for field in fields {
        let value = match (&field.default, &field.shape) {
            (Some(Preset::Integer(value)), _) => json!(value),
            (Some(Preset::False), _) => json!(false),
            (Some(Preset::Word(word)), _) => json!(word),
            (Some(Preset::Words(words)), _) => json!(words),
            (None, Shape::Object(fields)) => defaults(fields),
            (None, _) => continue,
        };
        object.insert(field.name.to_owned(), value);
    }
    Value::Object(object)
}

/// What an object without these members means to the type must be what a cluster writes into it.
#[test]
fn the_schemas_defaults_are_those_of_the_types() {
    let given = json!({"model": {"name": "m"}, "engine": {"type": "Builtin"}});
    let spec: PoolSpec = serde_json::from_value(given).unwrap();
    let mut with_defaults = defaults(POOL);
    with_defaults["model"]["name"] = json!("m");
    with_defaults["engine"]["type"] = json!("Builtin");
    // Members that have to be given, or say nothing where they are empty.
    for (object, member) in [
        ("engine", "simulated"),
        ("accelerator", "rdma"),
        ("template", "affinity"),
    ] {
        with_defaults[object]
            .as_object_mut()
            .unwrap()
            .remove(member);
    }
    let written: PoolSpec = serde_json::from_value(with_defaults).unwrap();
    let resource_name = written.accelerator.resource_name().to_owned();
    assert_eq!(resource_name, spec.accelerator.resource_name());
    let mut written = written;
    written.accelerator.resource_name = None;
    assert_eq!(written, spec);

    let given = json!({"model": "m", "decodePools": []});
    let spec: RoutePolicySpec = serde_json::from_value(given).unwrap();
    let mut with_defaults = defaults(ROUTE_POLICY);
    with_defaults["model"] = json!("m");
    with_defaults["decodePools"] = json!([]);
    with_defaults.as_object_mut().unwrap().remove("onNoPrefill");
    let mut written: RoutePolicySpec = serde_json::from_value(with_defaults).unwrap();
    assert_eq!(
        written.cost.preset.take(),
        Some(crate::policy::Preset::Balanced)
    );
    assert_eq!(written, spec);
}

/// `kubectl explain` has something to say about each field.
#[test]
fn every_field_is_described() {
    fn look(fields: &[Field], path: &str) {
        for field in fields {
            let path = format!("{path}.{}", field.name);
            assert!(
                field.about.ends_with('.') && field.about.len() > 5,
                "{path}: {:?}",
                field.about
            );
            let mut shape = &field.shape;
            while let Shape::List { of, .. } | Shape::Map { of, .. } = shape {
                shape = of;
            }
            if let Shape::Object(fields) = shape {
                look(fields, &path);
            }
        }
    }
    for (fields, name) in [
        (POOL, "pool"),
        (ROUTE_POLICY, "policy"),
        (POOL_STATUS, "pool status"),
        (POLICY_STATUS, "policy status"),
    ] {
        look(fields, name);
    }
}
