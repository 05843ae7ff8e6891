//! Released protos are frozen: no number changes its meaning, none is used again, and what is new comes with a proto of
//! its own, for agents that sleep in captures speak the old one.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use prost::Message as _;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use sandbox_protocol::{DESCRIPTOR_SET, limits::PROTO_MAX};

use crate::{documents::blessing, none, tree};

const PACKAGE: &str = "sandbox.v1";

fn frozen_path(proto: u32) -> PathBuf {
    tree::root().join(format!("protocol/frozen/proto-{proto}.binpb"))
}

/// The package's own files, without comments.
fn own(set: &[u8]) -> FileDescriptorSet {
    let mut set = FileDescriptorSet::decode(set).expect("a descriptor set");
    set.file.retain(|file| file.package() == PACKAGE);
    for file in &mut set.file {
        file.source_code_info = None;
    }
    set
}

/// What a set promises: each number (`message#3`, `enum=3`) or method with its meaning, and the numbers given up.
#[derive(Debug, Default)]
struct Promises {
    held: BTreeMap<String, String>,
    reserved: BTreeSet<String>,
}

impl Promises {
    fn of(set: &FileDescriptorSet) -> Self {
        let mut promises = Self::default();
        for file in &set.file {
            promises.add_file(file);
        }
        promises
    }

    fn add_file(&mut self, file: &FileDescriptorProto) {
        for message in &file.message_type {
            self.add_message(file.package(), message);
        }
        for one in &file.enum_type {
            self.add_enum(file.package(), one);
        }
        for service in &file.service {
            for method in &service.method {
                let stream = |streams: bool| if streams { "stream " } else { "" };
                let meaning = format!(
                    "{}{} -> {}{}",
                    stream(method.client_streaming()),
                    method.input_type(),
                    stream(method.server_streaming()),
                    method.output_type()
                );
                self.held
                    .insert(format!("{}/{}", service.name(), method.name()), meaning);
            }
        }
    }

    fn add_message(&mut self, above: &str, message: &DescriptorProto) {
        let path = format!("{above}.{}", message.name());
        for field in &message.field {
            let oneof = field
                .oneof_index
                .and_then(|index| message.oneof_decl.get(usize::try_from(index).ok()?));
            let meaning = format!(
                "{} {:?} {:?} {} in {:?}, optional {}",
                field.name(),
                field.label(),
                field.r#type(),
                field.type_name(),
                oneof.map(|oneof| oneof.name()),
                field.proto3_optional()
            );
            self.held.insert(format!("{path}#{}", field.number()), meaning);
        }
        for range in &message.reserved_range {
            self.reserved
                .extend((range.start()..range.end()).map(|number| format!("{path}#{number}")));
        }
        for nested in &message.nested_type {
            self.add_message(&path, nested);
        }
        for nested in &message.enum_type {
            self.add_enum(&path, nested);
        }
    }

    fn add_enum(&mut self, above: &str, one: &EnumDescriptorProto) {
        let path = format!("{above}.{}", one.name());
        for value in &one.value {
            self.held
                .insert(format!("{path}={}", value.number()), value.name().to_owned());
        }
        for range in &one.reserved_range {
            // Of an enum, the end belongs to it.
            self.reserved
                .extend((range.start()..=range.end()).map(|number| format!("{path}={number}")));
        }
    }
}

/// What breaks the promises of a frozen set; `newest`: it is the proto that is spoken now, so nothing may be new.
fn broken(frozen: &FileDescriptorSet, current: &FileDescriptorSet, newest: bool) -> Vec<String> {
    let (frozen, current) = (Promises::of(frozen), Promises::of(current));
    let mut complaints = Vec::new();
    for (place, meaning) in &frozen.held {
        match current.held.get(place) {
            Some(now) if now == meaning => {}
            Some(now) => complaints.push(format!("{place} was `{meaning}` and is `{now}`")),
            None if current.reserved.contains(place) => {}
            None => complaints.push(format!("{place} (`{meaning}`) is gone and not reserved")),
        }
    }
    for place in frozen
        .reserved
        .iter()
        .filter(|place| current.held.contains_key(*place))
    {
        complaints.push(format!("{place} was given up and is used again"));
    }
    if newest {
        for (place, meaning) in current
            .held
            .iter()
            .filter(|(place, _)| !frozen.held.contains_key(*place))
        {
            complaints.push(format!("{place} (`{meaning}`) is new: it needs the next proto"));
        }
    }
    complaints
}

#[test]
fn frozen_protos_are_kept() {
    let current = own(DESCRIPTOR_SET);
    let newest = frozen_path(PROTO_MAX);
    if blessing() {
        std::fs::create_dir_all(newest.parent().expect("it lies in a folder")).expect("the folder is made");
        std::fs::write(&newest, current.encode_to_vec()).expect("the frozen set is written");
    }
    for proto in 1..=PROTO_MAX {
        let path = frozen_path(proto);
        let bytes = std::fs::read(&path)
            .unwrap_or_else(|error| panic!("proto {proto} is not frozen ({}: {error})", path.display()));
        let frozen = own(&bytes);
        assert!(
            !frozen.file.is_empty(),
            "{} holds nothing of {PACKAGE}",
            path.display()
        );
        let complaints = broken(&frozen, &current, proto == PROTO_MAX);
        none(
            complaints
                .into_iter()
                .map(|complaint| format!("proto {proto}: {complaint}")),
        );
    }
}

#[test]
fn broken_promises_are_told() {
    let current = own(DESCRIPTOR_SET);
    assert!(broken(&current, &current, true).is_empty());

    let file = |set: &FileDescriptorSet, name: &str| {
        set.file
            .iter()
            .position(|file| file.name().ends_with(name))
            .expect("the file is there")
    };
    let mut changed = current.clone();
    let types = file(&changed, "types.proto");
    let message = &mut changed.file[types].message_type[0];
    message.field[0].number = Some(100);
    let told = broken(&current, &changed, true);
    assert_eq!(told.len(), 2, "gone and new: {told:?}");
    // The next proto may bring it.
    assert_eq!(broken(&current, &changed, false).len(), 1);

    let mut changed = current.clone();
    changed.file[types].enum_type[0].value[1].number = Some(0);
    assert!(!broken(&current, &changed, true).is_empty());

    let mut changed = current.clone();
    let claims = file(&changed, "claims.proto");
    changed.file[claims].service[0].method[0].server_streaming = Some(true);
    assert_eq!(broken(&current, &changed, true).len(), 1);

    // A number that is given up says so, and stays given up.
    let mut gone = current.clone();
    let field = gone.file[types].message_type[0].field.remove(0);
    assert_eq!(broken(&current, &gone, true).len(), 1);
    gone.file[types].message_type[0]
        .reserved_range
        .push(prost_types::descriptor_proto::ReservedRange {
            start: Some(field.number()),
            end: Some(field.number() + 1),
        });
    assert!(broken(&current, &gone, true).is_empty());
    assert!(
        broken(&gone, &current, true)
            .iter()
            .any(|told| told.ends_with("used again"))
    );
}
