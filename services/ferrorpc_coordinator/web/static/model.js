// The data behind the page: the last state, and rates computed by comparing it with earlier ones.

const WINDOW_MS = 8_000;
const SPARK_MAX = 60;
const LATE_MS = 2_000;
const BEHIND_MS = 5_000;
const IN_STEP = 64;
const SLOW_FACTOR = 1.3;

export const SEVERITY = { dead: 0, suspect: 1, stalled: 2, joining: 3, waiting: 4, active: 5, left: 6 };

// Whether a member has left or died, so that it has no rates.
export function gone(member) {
  return member.state === "left" || member.state === "dead";
}

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.state = null;
    this.members = [];
    this.past = [];
    this.sparks = new Map();
  }

  // `history`: member -> list of beat ages, oldest first.
  setHistory(history) {
    for (const [name, ages] of Object.entries(history)) this.sparks.set(name, ages.slice(-SPARK_MAX));
    this.sparkAt = null;
  }

  update(state) {
    const columns = state.members;
    const restarted = this.state && (this.state.cluster_id !== state.cluster_id || this.state.epoch !== state.epoch);
    if (restarted || (this.state && this.state.generation !== state.generation)) this.past = [];
    this.state = state;
    this.members = columns.name.map((_, i) => Object.fromEntries(Object.keys(columns).map((key) => [key, columns[key][i]])));
    const byName = new Map(this.members.map((member) => [member.name, { ...member }]));
    const links = new Map(state.links.map(([from, to, kind, sent]) => [`${from}>${to}`, { from, to, kind, sent }]));
    this.past.push({ at: state.at_ms, members: byName, links });
    while (this.past.length > 2 && this.past[1].at < state.at_ms - WINDOW_MS) this.past.shift();
    this.#barriers();
    this.#rates();
    this.#spark(state.at_ms);
  }

  // For members at or missing from an open barrier, this is shown in place of their last operation.
  #barriers() {
    const byRank = new Map(this.ranked().map((member) => [member.rank, member]));
    for (const barrier of this.state.barriers) {
      if (barrier.generation !== this.state.generation) continue;
      for (const rank of barrier.arrived) if (byRank.has(rank)) byRank.get(rank).doing = `waits at barrier ${barrier.name}`;
      for (const rank of barrier.missing) if (byRank.has(rank)) byRank.get(rank).missing ||= barrier;
    }
    for (const member of this.members) {
      if (member.missing) member.doing = `missing at barrier ${member.missing.name}; last seen in ${member.activity || "nothing yet"}`;
      member.doing ||= member.activity;
    }
  }

  #rates() {
    const before = this.past[0];
    const seconds = (this.state.at_ms - before.at) / 1000;
    const late = this.#lateRanks();
    for (const member of this.members) {
      const earlier = before.members.get(member.name);
      const known = seconds > 0.2 && earlier && member.step >= earlier.step && !gone(member);
      const steps = known ? member.step - earlier.step : 0;
      const operationShare = known ? Math.min(1, Math.max(0, (member.operation_ms - earlier.operation_ms) / 1000 / seconds)) : null;
      member.stepsPerSecond = known ? steps / seconds : null;
      member.operationShare = operationShare;
      member.stepMs = steps > 0 ? (seconds * 1000) / steps : null;
      member.ownMs = steps > 0 ? member.stepMs * (1 - operationShare) : null;
      member.training = stepTimes(member.training, earlier && earlier.training);
      const barrierMs = member.missing && member.missing.age_ms > LATE_MS ? member.missing.age_ms : 0;
      member.lateMs = Math.max(barrierMs, late.has(member) ? member.step_age_ms : 0);
    }
    const there = new Set(this.ranked().filter((member) => !gone(member)).map((member) => member.rank));
    this.links = [...this.past.at(-1).links.entries()].map(([key, link]) => {
      const earlier = before.links.get(key);
      const known = seconds > 0.2 && (earlier || before !== this.past.at(-1)) && there.has(link.from);
      return { ...link, bytesPerSecond: known ? Math.max(0, link.sent - (earlier ? earlier.sent : 0)) / seconds : null };
    });
  }

  // Members whose step has not changed for a while although another member is ahead. If all members stand still, this counts only
  // while their steps are close together: then the others wait for the ones behind. Ranks that do different things, such as stages
  // of a pipeline, drift apart, and nobody waits for anybody while all of them compute.
  #lateRanks() {
    const there = this.ranked().filter((member) => !gone(member));
    const steps = there.map((member) => member.step);
    const front = Math.max(0, ...steps);
    const grace = front - Math.min(...steps) <= IN_STEP ? 0 : Math.min(...there.map((member) => member.step_age_ms));
    return new Set(there.filter((member) => member.step < front && member.step_age_ms - grace > LATE_MS));
  }

  #spark(at) {
    if (this.sparkAt && at - this.sparkAt < 950) return;
    this.sparkAt = at;
    for (const member of this.members) {
      const ages = this.sparks.get(member.name) || [];
      ages.push(gone(member) ? -1 : member.beat_age_ms);
      this.sparks.set(member.name, ages.slice(-SPARK_MAX));
    }
  }

  // The members with a rank, in rank order.
  ranked() {
    return this.members.filter((member) => member.rank >= 0);
  }

  // The members that have a rank or may get one, without former members of earlier generations.
  present() {
    return this.members.filter((member) => member.rank >= 0 || !gone(member));
  }

  // The members with known step times, the one with the longest time between operations first: the others wait for it.
  byOwnTime() {
    return this.ranked().filter((member) => member.ownMs !== null).sort((a, b) => b.ownMs - a.ownMs);
  }

  // The members that train, the one with the longest computing time per step first.
  byComputeTime() {
    return this.ranked().filter((member) => member.training).sort((a, b) => b.training.computeMs - a.training.computeMs);
  }

  // Describes a rank that is slower than the others although it works; empty if there is none.
  slowest() {
    const training = this.byComputeTime();
    if (training.length > 1) return slowestOf(training, (member) => member.training.computeMs, "of computing in a training step");
    return slowestOf(this.byOwnTime(), (member) => member.ownMs, "between two operations");
  }

  newest() {
    return this.state.generations.at(-1) || null;
  }

  // The state of the job in a sentence: [good | warn | bad | idle, headline, details].
  summary() {
    const ranked = this.ranked();
    const newest = this.newest();
    const unresponsive = ranked.filter((member) => member.state === "stalled" || member.state === "suspect");
    const working = ranked.filter((member) => member.state === "active").length;
    const waiting = this.state.waiting ? `Next round: ${this.state.waiting}` : "";
    const late = this.state.barriers.filter((barrier) => barrier.missing.length && barrier.age_ms > 1000);
    if (!newest) return ["idle", this.members.length ? "The first round is still open" : "Nobody has joined yet", waiting];
    if (newest.end_reason) {
      const over = ranked.length && ranked.every((member) => member.state === "left");
      if (over) return ["idle", "The job is over: all its members left", waiting];
      const [, what, why] = newest.end_reason.match(/^(.*?)(?:: (.*))?$/s);
      const more = [why, `generation ${newest.generation} is over`, waiting];
      return ["bad", what.charAt(0).toUpperCase() + what.slice(1), more.filter(Boolean).join(" · ")];
    }
    if (unresponsive.length) {
      const [first] = unresponsive;
      const others = unresponsive.length > 1 ? `, and ${unresponsive.length - 1} more` : "";
      return ["warn", `Rank ${first.rank} is ${first.state}${others}`, [first.reason, waiting].filter(Boolean).join(" · ")];
    }
    if (late.length) return ["warn", ...this.#barrierWarning(late[0], waiting)];
    const behind = ranked.filter((member) => member.lateMs > BEHIND_MS).sort((a, b) => b.lateMs - a.lateMs);
    if (behind.length) return ["warn", ...this.#behindWarning(behind, waiting)];
    const left = ranked.length - working;
    const head = left ? `${working} of ${ranked.length} ranks work, ${left} left` : `All ${ranked.length} ranks work`;
    return ["good", ranked.length === 1 && !left ? "The one rank works" : head, [waiting, this.slowest()].filter(Boolean).join(" · ")];
  }

  #barrierWarning(barrier, waiting) {
    const seconds = (barrier.age_ms / 1000).toFixed(1);
    const few = barrier.missing.slice(0, 3).map((rank) => this.ranked().find((member) => member.rank === rank)).filter(Boolean);
    const told = few.map((member) => `rank ${member.rank} on ${member.host || "?"}${member.activity ? ` was last seen in ${member.activity}` : ""}`);
    const who = barrier.missing.length === 1 ? `rank ${barrier.missing[0]}` : `${barrier.missing.length} ranks`;
    return [`Barrier ${barrier.name} has waited ${seconds} s for ${who}`, [told.join(" · "), waiting].filter(Boolean).join(" · ")];
  }

  // `behind`: the members that are behind, the longest first.
  #behindWarning(behind, waiting) {
    const front = Math.max(...this.ranked().map((member) => member.step));
    const told = behind.slice(0, 3).map((member) => `rank ${member.rank} on ${member.host || "?"} is at step ${member.step}, its last operation: ${member.activity || "none"}`);
    const who = behind.length === 1 ? `Rank ${behind[0].rank} has` : `${behind.length} ranks have`;
    const head = `${who} been behind for ${(behind[0].lateMs / 1000).toFixed(0)} s`;
    return [head, [`others are at step ${front}`, ...told, waiting].filter(Boolean).join(" · ")];
  }
}

// Times per training step: over the steps since `before`, or over all steps if none ended since; null before the first.
function stepTimes(now, before) {
  if (!now) return null;
  const since = before && before[0] < now[0] ? now.map((value, i) => value - before[i]) : now;
  const [steps, computeMs, exposedMs, hiddenMs] = since;
  return { steps: now[0], computeMs: computeMs / steps, exposedMs: exposedMs / steps, hiddenMs: hiddenMs / steps };
}

// `order`: the members, the slowest first.
function slowestOf(order, ms, of) {
  const typical = order[Math.floor(order.length / 2)];
  if (order.length < 2 || ms(order[0]) < SLOW_FACTOR * ms(typical) || ms(order[0]) - ms(typical) < 1) return "";
  const [own, others] = [ms(order[0]), ms(typical)].map((value) => (value < 10 ? value.toFixed(1) : Math.round(value)));
  return `The slowest is rank ${order[0].rank}: ${own} ms ${of}, where others need ${others} ms`;
}
