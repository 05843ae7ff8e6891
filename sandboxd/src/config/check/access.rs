//! `[tenant.NAME]`, `[access]`.

use std::{collections::BTreeMap, sync::Arc};

use super::{LIST, egress, exists, or, table_name};
use crate::{
    config::{
        types::{Access, Role, Tenant, TenantPools, Token},
        values,
        walk::{Section, Walk, Wrong},
    },
    policy::Layer,
    words::{Name, OPERATOR},
};

pub(super) fn tenants(
    walk: &mut Walk,
    root: &mut Section<'_>,
    policies: &BTreeMap<Name, Arc<Layer>>,
) -> BTreeMap<Name, Tenant> {
    let mut tenants = BTreeMap::new();
    for (name, mut table) in walk.named(root, "tenant") {
        let everything = |value: &toml::de::DeValue<'_>| match values::text(value)? {
            "*" => Ok(None),
            said => values::parse_name(said).map(Some),
        };
        let pools = walk.list(&mut table, "pools", LIST, everything);
        let pools = match pools {
            None => TenantPools::All,
            Some(named) => named
                .into_iter()
                .map(|found| found.value)
                .collect::<Option<_>>()
                .map_or(TenantPools::All, TenantPools::Named),
        };
        let egress = egress::named(walk, &mut table, policies);
        let span = name.span.clone();
        match table_name(walk, &name, &table) {
            // What operators claim stands under this name.
            Some(name) if name.as_str() == OPERATOR => {
                let wrong = Wrong::new("this name is the operators'", "another name");
                walk.mistake(span, format!("tenant.{OPERATOR}"), wrong);
            }
            Some(name) => drop(tenants.insert(name, Tenant { pools, egress })),
            None => {}
        }
        walk.done(table);
    }
    tenants
}

pub(super) fn access(walk: &mut Walk, root: &mut Section<'_>, tenants: &BTreeMap<Name, Tenant>) -> Access {
    let mut table = walk.section(root, "access");
    let operator_group = or(
        walk.get(&mut table, "operator_group", values::account),
        Some("sandboxd".to_owned()),
    );
    let mut tokens: Vec<Token> = Vec::new();
    for mut entry in walk.sections(&mut table, "token", LIST) {
        let token = token(walk, &mut entry, tenants);
        let span = entry.span();
        walk.done(entry);
        let Some(token) = token else { continue };
        let doubled = tokens
            .iter()
            .find(|other| other.name == token.name || other.sha256 == token.sha256);
        if let Some(other) = doubled {
            let what = format!(
                "token `{}` has the name or the hash of token `{}`",
                token.name, other.name
            );
            walk.mistake(
                span,
                "access.token".to_owned(),
                Wrong::new(what, "each token has its own"),
            );
            continue;
        }
        tokens.push(token);
    }
    walk.done(table);
    Access {
        operator_group,
        tokens,
    }
}

#[derive(Clone, Copy)]
enum RoleWord {
    Operator,
    Tenant,
}

const ROLES: &[(&str, RoleWord)] = &[("operator", RoleWord::Operator), ("tenant", RoleWord::Tenant)];

fn token(walk: &mut Walk, table: &mut Section<'_>, tenants: &BTreeMap<Name, Tenant>) -> Option<Token> {
    let before = walk.mistakes.len();
    let name = walk.get(table, "name", values::name);
    let sha256 = walk.get(table, "sha256", values::sha256);
    let role = walk.get(table, "role", values::word(ROLES));
    let tenant = walk.get(table, "tenant", values::name);
    if walk.mistakes.len() > before {
        return None;
    }
    let mut missing = |key: &str| {
        let wrong = Wrong::new(
            format!("a token has no `{key}`"),
            "name, sha256, role, and tenant with role = \"tenant\"",
        );
        walk.mistake(table.span(), table.key(key), wrong);
    };
    let (Some(name), Some(sha256), Some(role)) = (&name, &sha256, &role) else {
        for (key, absent) in [
            ("name", name.is_none()),
            ("sha256", sha256.is_none()),
            ("role", role.is_none()),
        ] {
            if absent {
                missing(key);
            }
        }
        return None;
    };
    let role = match (role.value, tenant) {
        (RoleWord::Operator, None) => Role::Operator,
        (RoleWord::Tenant, None) => {
            missing("tenant");
            return None;
        }
        (RoleWord::Operator, Some(tenant)) => {
            let wrong = Wrong::new(
                "an operator's token has no tenant",
                "remove it, or role = \"tenant\"",
            );
            walk.mistake(tenant.span, table.key("tenant"), wrong);
            return None;
        }
        (RoleWord::Tenant, Some(tenant)) => {
            exists(walk, table.key("tenant"), "tenant", &tenant, tenants);
            Role::Tenant(tenant.value)
        }
    };
    Some(Token {
        name: name.value.clone(),
        sha256: sha256.value,
        role,
    })
}
