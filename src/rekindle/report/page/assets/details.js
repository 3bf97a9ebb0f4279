/* What is known of a block beside its plan: the largest saved tensors in it, by op and line. */

function isInside(path, outer) {
  return path === outer || outer === "" || path.startsWith(`${outer}.`);
}

function savedInside(explanation, path, most) {
  if (!explanation) return [];
  const found = [];
  for (const saved of explanation.saved) {
    const inside = saved.modules.filter((index) => isInside(explanation.names[index], path));
    if (inside.length) found.push({ saved, bytes: (saved.bytes * inside.length) / saved.modules.length });
  }
  return found.sort((a, b) => b.bytes - a.bytes).slice(0, most);
}

function formatSavedTensor({ saved, bytes }) {
  const where = saved.line ? ` at ${saved.line}` : "";
  return `${formatBytes(bytes)} by ${saved.op}${where}`;
}
