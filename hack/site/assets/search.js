// The theme matches every word of a query by its beginning, so "in a job" finds whatever begins with "in" or "a". Words that say nothing are left out.
const QUERY = 2;
const EMPTY = new Set(("a about after all an and any are as at be before but by can could do does for from get had has have how i if in into is it its make " +
  "me my no not of on or our should so that the their them then there they this to want was we what when where which while who why will with you your").split(" "));

const send = window.Worker.prototype.postMessage;
window.Worker.prototype.postMessage = function (message, ...rest) {
  if (message && message.type === QUERY && typeof message.data === "string") {
    const kept = message.data.split(/\s+/).filter((word) => !EMPTY.has(word.toLowerCase().replace(/[?!.,;]+$/, "")));
    message = {...message, data: (kept.length ? kept.join(" ") : message.data).replace(/[?!,;]+(?=\s|$)/g, "")};
  }
  return send.call(this, message, ...rest);
};
