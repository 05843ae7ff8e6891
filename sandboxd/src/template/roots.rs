//! What guests trust: the roots of this node's CA, put into each template that is built, and listed in its manifest.

use std::sync::Arc;

use super::{TemplateError, Templates};
use crate::{ca::Trust, engine::Capture, words::PoolKey};

/// Brings roots into a guest: `$1` names the file of them alone, `$2` that of the guest's own with them, `$3` is PEM. Where
/// programs find roots unasked, ours come behind those that are there; Debian's own tool finds them too when it makes that
/// file anew. The file of ours alone comes last, for by it silkd knows that all is there.
pub(super) const SCRIPT: &str = r#"set -eu
umask 022
mkdir -p /etc/silkd /etc/ssl/certs
store=/etc/ssl/certs/ca-certificates.crt
for known in "$store" /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
  if [ -s "$known" ]; then store=$known; break; fi
done
printf '\n%s' "$3" >>"$store"
cat "$store" >"/etc/silkd/$2"
if [ -d /usr/share/ca-certificates ]; then
  mkdir -p /usr/local/share/ca-certificates
  printf '%s' "$3" >/usr/local/share/ca-certificates/sandboxd.crt
fi
printf '%s' "$3" >"/etc/silkd/$1"
"#;

impl Templates {
    /// What guests of builds from now on are to trust; none: this node looks into nothing.
    pub fn set_trust(&self, trust: Option<Trust>) {
        self.known_mut().trust = trust.map(Arc::new);
    }

    /// What guests are to trust.
    #[must_use]
    pub fn trust(&self) -> Option<Arc<Trust>> {
        self.known().trust.clone()
    }

    /// Whether guests of a capture would not trust what this node's doors show them.
    #[must_use]
    pub fn lacks_root(&self, capture: &Capture) -> bool {
        let trust = self.trust();
        trust.is_some_and(|trust| !capture.manifest().ca.contains(&trust.root))
    }

    /// Whether a rule may look into the tunnels of guests of this variant.
    ///
    /// # Errors
    /// [`TemplateError::NoCa`], [`TemplateError::NotBuilt`], [`TemplateError::CaNotInTemplate`].
    pub fn may_look_inside(&self, key: &PoolKey) -> Result<(), TemplateError> {
        let trust = self.trust().ok_or(TemplateError::NoCa)?;
        let capture = self
            .current(key)
            .ok_or_else(|| TemplateError::NotBuilt(key.template.clone()))?;
        if self.lacks_root(&capture) {
            return Err(TemplateError::CaNotInTemplate {
                template: key.template.clone(),
                root: trust.root.short(),
            });
        }
        Ok(())
    }
}
