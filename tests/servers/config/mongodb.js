// Makes the replica set and its users in Docker; tests/servers/mongodb.py does
// the same where there is none. It ends with an error where it is too early,
// and is to be run again then.
const [administrator, ...others] = JSON.parse(require("fs").readFileSync("/config/mongodb-users.json", "utf8"));
const admin = db.getSiblingDB("admin");

function make({ $db, ...user }) {
  db.getSiblingDB($db).runCommand(user);
}

try {
  admin.auth(administrator.createUser, administrator.pwd);
} catch (notYet) {
  const host = `127.0.0.1:${process.env.OUTBOXD_MONGODB_PORT}`;
  try {
    rs.initiate({ _id: "rs0", members: [{ _id: 0, host }] });
  } catch (error) {
    if (error.codeName !== "AlreadyInitialized") throw error;
  }
  while (!admin.hello().isWritablePrimary) sleep(100);
  make(administrator);
  admin.auth(administrator.createUser, administrator.pwd);
  others.forEach(make);
}
