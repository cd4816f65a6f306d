// Earlier versions of a conversation: its messages as they were before an answer was made anew, or a message was edited.
//
// In memory each version is a whole list of messages, and a message that versions share is one object. Stored, a version is
// { shared, messages }: how many messages it begins with as the conversation does, and its others.

export const MOST_VERSIONS = 8; // the oldest ones go

/** The earlier versions of a conversation once it consists of `messages`: one more where those leave something out. */
export function earlierThan(messages, conversation) {
  const { messages: before, earlier } = conversation;
  return sharedLength(before, messages) === before.length ? earlier : [...earlier, before].slice(-MOST_VERSIONS);
}

/** Make the newest earlier version the conversation's messages. What they were becomes the oldest one, so that all come round. */
export function bringBack(conversation) {
  const { messages, earlier } = conversation;
  conversation.messages = earlier.at(-1);
  conversation.earlier = [messages, ...earlier.slice(0, -1)];
}

/** A conversation as it is stored. */
export function packed(conversation) {
  const { messages } = conversation;
  const earlier = conversation.earlier.map((version) => {
    const shared = sharedLength(version, messages);
    return { shared, messages: version.slice(shared) };
  });
  return { ...conversation, earlier };
}

function sharedLength(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return length;
}
